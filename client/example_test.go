package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"slices"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/subjects"
)

// The examples need a NATS server with a pool in it. Here one is embedded, and
// a stand-in answers for dispatchers and agents; `rollbus up` starts real ones.
func examplePool() (nc *nats.Conn, stop func()) {
	dir, err := os.MkdirTemp("", "rollbus-example")
	check(err)
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: dir, NoLog: true, NoSigs: true})
	check(err)
	go s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		log.Fatal("NATS did not start")
	}
	nc, err = nats.Connect(s.ClientURL())
	check(err)
	js, err := jetstream.New(nc)
	check(err)
	pool, err := subjects.NewPool("qwen3")
	check(err)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	check(subjects.Ensure(ctx, js, pool, subjects.Layout{Budget: 128 << 20}))
	agent, end := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); standIn(agent, js, pool, "math") }()
	return nc, func() {
		end()
		<-done
		nc.Close()
		s.Shutdown()
		s.WaitForShutdown()
		_ = os.RemoveAll(dir)
	}
}

// standIn answers every request of a job with "echo" and the prompt.
func standIn(ctx context.Context, js jetstream.JetStream, pool subjects.Pool, job string) {
	cons, err := js.CreateConsumer(ctx, pool.Rollouts(), pool.RolloutsConsumer(job, subjects.LaneNormal))
	if err != nil {
		return // stopped before it began
	}
	for ctx.Err() == nil {
		batch, err := cons.Fetch(16, jetstream.FetchContext(ctx))
		if err != nil {
			return
		}
		for m := range batch.Messages() {
			r, err := subjects.DecodeRequest(m.Data())
			check(err)
			res, err := json.Marshal(subjects.Result{
				SchemaVersion: subjects.SchemaVersion, ID: r.ID, Job: r.Job, Attempt: 1, Status: subjects.Completed,
				FinishReason: "stop", Text: "echo " + r.Prompt, ReplyKey: r.ReplyKey, Group: r.Group,
			})
			check(err)
			facts := subjects.Answer{Status: subjects.Completed, Bind: 1, LeftMS: 60_000}
			_, err = js.PublishMsg(ctx, &nats.Msg{
				Subject: pool.Result(r.Job, r.ReaderOrDefault(), r.ID), Header: facts.Header(), Data: res,
			}, jetstream.WithExpectLastSequencePerSubject(0))
			if err != nil && ctx.Err() == nil {
				log.Fatal(err)
			}
			_ = m.Ack()
		}
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Submit a prompt and wait for its answer.
func Example() {
	nc, stop := examplePool()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	c, err := client.Open(ctx, nc, "qwen3", "math")
	check(err)
	defer c.Close()
	res, err := c.Do(ctx, &subjects.Request{
		Prompt:   "1 + 1 =",
		Sampling: subjects.SamplingParams{MaxTokens: 16},
	})
	check(err)
	fmt.Println(res.Status, res.Text)
	// Output: completed echo 1 + 1 =
}

// A trainer's loop: the samples of a prompt out, their answers in. An answer is
// received when the loop asks for the next one, so that a crash in the body
// brings it back.
func ExampleClient_Results() {
	nc, stop := examplePool()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	c, err := client.Open(ctx, nc, "qwen3", "math")
	check(err)
	defer c.Close()
	samples, err := client.Expand(&subjects.Request{
		ID: "step1-p7", Prompt: "2 + 2 =", Sampling: subjects.SamplingParams{MaxTokens: 16},
	}, 4)
	check(err)
	for _, s := range samples {
		_, err := c.Submit(ctx, s)
		check(err)
	}
	n := 0
	for res, err := range c.Results(ctx) {
		check(err)
		fmt.Println(res.ID, res.Status)
		if n++; n == len(samples) {
			check(c.Done(ctx, res)) // leaving the loop does not say so
			break
		}
	}
	// Output:
	// step1-p7-0 completed
	// step1-p7-1 completed
	// step1-p7-2 completed
	// step1-p7-3 completed
}

// Many requests at the pool's own pace: when it is full, the refused ones wait
// as long as it asks and go again, under the same ids.
func ExampleClient_SubmitMany() {
	nc, stop := examplePool()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	c, err := client.Open(ctx, nc, "qwen3", "math", client.MaxInFlight(64))
	check(err)
	defer c.Close()
	var todo []*subjects.Request
	for i := range 1000 {
		todo = append(todo, &subjects.Request{
			ID: fmt.Sprintf("step1-%04d", i), Prompt: "2 + 2 =", Sampling: subjects.SamplingParams{MaxTokens: 16},
		})
	}
	stored := 0
	for len(todo) > 0 {
		var refused []*subjects.Request
		var pause time.Duration
		n := 0
		for _, err := range c.SubmitMany(ctx, slices.Values(todo)) {
			full, isFull := errors.AsType[*client.BackpressureError](err)
			switch {
			case isFull:
				refused, pause = append(refused, todo[n]), full.RetryAfter
			case err != nil:
				log.Fatal(err)
			default:
				stored++
			}
			n++
		}
		todo = refused
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			log.Fatal(ctx.Err())
		}
	}
	fmt.Println(stored, "stored")
	// Output: 1000 stored
}

// A bad request names every problem, and nothing is sent.
func ExampleClient_Submit() {
	nc, stop := examplePool()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	c, err := client.Open(ctx, nc, "qwen3", "math")
	check(err)
	defer c.Close()
	topP := 1.5
	_, err = c.Submit(ctx, &subjects.Request{ID: "Step 1", Prompt: "x", Sampling: subjects.SamplingParams{TopP: &topP}})
	for _, f := range subjects.FieldErrors(err) {
		fmt.Println(f)
	}
	// Output:
	// id: id "Step 1" has 'S' at byte 0: use only a-z 0-9 _ -
	// sampling_params.max_tokens: is missing or 0: give how many tokens may be generated, at least 1
	// sampling_params.top_p: is 1.5: give more than 0, at most 1
}
