package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/rollbus/rollbus/kvstate/natstest"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"rollbus": main})
}

// The stories of testdata/script run the real program, as processes. Beside
// testscript's own commands they have:
//
//	exits CODE command args...   runs a command that must end with that code
//	await FILE                   waits until FILE exists
//	server FILE                  takes the server's address from up's ready file
//	engine FILE                  takes the engine's address from its ready file
//	publish SUBJECT MSGID FILE   publishes a file as it is, with that message id
//	nats [user password]         starts a NATS server in the test and sets its address
func TestStories(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits, "await": await, "server": useServer, "engine": useEngine,
			"publish": publishRaw,
			"nats":    func(ts *testscript.TestScript, _ bool, args []string) { startNATS(t, ts, args) },
		},
		Setup: func(e *testscript.Env) error {
			e.Setenv("ROLLBUS_SERVER", "nats://127.0.0.1:1") // nobody's, until a story has its own
			e.Setenv("HOME", e.WorkDir)
			return nil
		},
	})
}

func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE command args...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		e, ok := errors.AsType[*exec.ExitError](err)
		if !ok {
			ts.Fatalf("run %v: %v", args[1:], err)
		}
		got = e.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// awaitWithin is how long a story waits for a file.
const awaitWithin = 30 * time.Second

func await(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: await FILE")
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	late := time.After(awaitWithin)
	for {
		if _, err := os.Stat(ts.MkAbs(args[0])); err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-late:
			ts.Fatalf("%s did not appear within %v", args[0], awaitWithin)
		}
	}
}

func useServer(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: server FILE")
	}
	var at addresses
	ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[0])), &at))
	ts.Setenv("ROLLBUS_SERVER", at.NATS)
	ts.Setenv("UP_HTTP", at.HTTP)
}

func useEngine(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: engine FILE")
	}
	var at engineAddress
	ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[0])), &at))
	ts.Setenv("ENGINE_URL", at.URL)
}

func publishRaw(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: publish SUBJECT MSGID FILE")
	}
	nc, err := nats.Connect(ts.Getenv("ROLLBUS_SERVER"))
	ts.Check(err)
	defer nc.Close()
	js, err := jetstream.New(nc)
	ts.Check(err)
	ctx, cancel := context.WithTimeout(context.Background(), awaitWithin)
	defer cancel()
	_, err = js.Publish(ctx, args[0], []byte(ts.ReadFile(args[2])), jetstream.WithMsgID(args[1]))
	ts.Check(err)
}

func startNATS(t *testing.T, ts *testscript.TestScript, args []string) {
	var options []natstest.Option
	if len(args) == 2 {
		options = append(options, natstest.Tweak(func(o *server.Options) { o.Username, o.Password = args[0], args[1] }))
	}
	node := natstest.Server(t, options...)
	ts.Setenv("ROLLBUS_SERVER", node.URL())
}
