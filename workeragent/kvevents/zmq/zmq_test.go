package zmq_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	zmq4 "github.com/go-zeromq/zmq4"
	"go.uber.org/goleak"

	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/workeragent/kvevents/zmq"
)

// The library's sockets, the other side of these tests, keep goroutines for a
// while after Close: they are not this package's.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*socket).connReaper"),
		goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*socket).accept"),
		goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*pubQReader).listen"),
		goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*pubMWriter).run"),
		goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*routerQReader).listen"))
}

func recv(t *testing.T, c *zmq.Conn) [][]byte {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	frames, err := c.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return frames
}

// within bounds every wait of these tests.
const within = 20 * time.Second

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	natstest.Eventually(t, within, what, ok)
}

func TestSubscribesToALibrarysPublisher(t *testing.T) {
	pub := zmq4.NewPub(t.Context())
	defer pub.Close()
	if err := pub.Listen("tcp://127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	c, err := zmq.Dial(t.Context(), "tcp://"+pub.Addr().String(), zmq.Options{Type: zmq.SUB, Subscribe: []string{"kv"}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	until(t, "subscription", func() bool { return len(pub.(zmq4.Topics).Topics()) == 1 })
	big := bytes.Repeat([]byte{7}, 300_000)
	for _, topic := range []string{"load", "kv-events", "kv"} {
		if err := pub.SendMulti(zmq4.NewMsgFrom([]byte(topic), []byte{0, 0, 0, 0, 0, 0, 0, 1}, big)); err != nil {
			t.Fatal(err)
		}
	}
	for _, topic := range []string{"kv-events", "kv"} {
		f := recv(t, c)
		if len(f) != 3 || string(f[0]) != topic || !bytes.Equal(f[2], big) {
			t.Errorf("%d frames, topic %q", len(f), f[0])
		}
	}
}

func TestAsksALibrarysRouter(t *testing.T) {
	router := zmq4.NewRouter(t.Context())
	defer router.Close()
	if err := router.Listen("tcp://127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() {
		m, err := router.Recv()
		if err == nil && len(m.Frames) != 3 {
			err = fmt.Errorf("%d frames", len(m.Frames))
		}
		for i := range byte(3) {
			if err == nil {
				err = router.SendMulti(zmq4.NewMsgFrom(m.Frames[0], nil, []byte{0, 0, 0, 0, 0, 0, 0, i}, []byte("payload")))
			}
		}
		answered <- err
	}()
	c, err := zmq.Dial(t.Context(), "tcp://"+router.Addr().String(), zmq.Options{Type: zmq.DEALER})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Send(nil, binary.BigEndian.AppendUint64(nil, 5)); err != nil {
		t.Fatal(err)
	}
	for i := range byte(3) {
		if f := recv(t, c); len(f) != 3 || len(f[0]) != 0 || f[1][7] != i {
			t.Errorf("answer %d: %q", i, f)
		}
	}
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

func TestAcceptsAPublisherThatDials(t *testing.T) {
	l, err := zmq.Listen(t.Context(), "tcp://127.0.0.1:0", zmq.Options{Type: zmq.SUB})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	pub := zmq4.NewPub(t.Context())
	defer pub.Close()
	dialled := make(chan error, 1)
	go func() { dialled <- pub.Dial("tcp://" + l.Addr().String()) }()
	c, err := l.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := <-dialled; err != nil {
		t.Fatal(err)
	}
	until(t, "subscription", func() bool { return len(pub.(zmq4.Topics).Topics()) == 1 })
	_ = pub.Send(zmq4.NewMsgFrom([]byte("a"), []byte("b")))
	if f := recv(t, c); len(f) != 2 {
		t.Errorf("got %q", f)
	}
}

// raw listens and lets serve speak on the first connection.
func raw(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { _ = l.Close(); <-done })
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		serve(c)
	}()
	return "tcp://" + l.Addr().String()
}

func publisherGreeting() []byte {
	g := make([]byte, 64)
	g[0], g[9], g[10], g[11] = 0xff, 0x7f, 3, 1
	copy(g[12:], "NULL")
	ready := append([]byte("\x05READY\x0bSocket-Type\x00\x00\x00\x03"), "PUB"...)
	return slices.Concat(g, []byte{4, byte(len(ready))}, ready)
}

// scenario C12: another program on the port.
func TestAPeerThatIsNoPublisherIsRefusedInTime(t *testing.T) {
	for name, serve := range map[string]func(net.Conn){
		"silent": func(c net.Conn) { _, _ = c.Read(make([]byte, 1000)); _, _ = c.Read(make([]byte, 1000)) },
		"http": func(c net.Conn) {
			_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + strings.Repeat("x", 100)))
		},
		"old": func(c net.Conn) { g := publisherGreeting(); g[10] = 2; _, _ = c.Write(g) },
		"a router": func(c net.Conn) {
			_, _ = c.Write(bytes.Replace(publisherGreeting(), []byte("\x03PUB"), []byte("\x03REP"), 1))
		},
		"encrypting": func(c net.Conn) { g := publisherGreeting(); copy(g[12:], "CURVE"); _, _ = c.Write(g) },
		"no ready":   func(c net.Conn) { _, _ = c.Write(append(publisherGreeting()[:64], 0, 1, 1)) },
		"huge ready": func(c net.Conn) {
			_, _ = c.Write(append(publisherGreeting()[:64], 6, 0x7f, 255, 255, 255, 255, 255, 255, 255))
		},
		"bad ready": func(c net.Conn) {
			_, _ = c.Write(append(publisherGreeting()[:64], append([]byte{4, 10}, "\x05READY\xff\x00\x00\x00"...)...))
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			c, err := zmq.Dial(ctx, raw(t, serve), zmq.Options{Type: zmq.SUB, Handshake: 200 * time.Millisecond})
			if err == nil {
				c.Close()
				t.Fatal("accepted")
			}
			if ctx.Err() != nil {
				t.Error("only the caller's own deadline ended it")
			}
		})
	}
}

func TestALengthIsNoReasonToAllocate(t *testing.T) {
	for name, tail := range map[string][]byte{
		"a frame of 2^63 bytes": {2, 0x80, 0, 0, 0, 0, 0, 0, 0},
		"beyond the bound":      {2, 0, 0, 0, 0, 0, 0x20, 0, 0},
		"endless frames":        bytes.Repeat([]byte{1, 0}, 100),
	} {
		at := raw(t, func(c net.Conn) {
			_, _ = c.Write(append(publisherGreeting(), tail...))
			_, _ = c.Read(make([]byte, 1000))
			_, _ = c.Read(make([]byte, 1000))
		})
		c, err := zmq.Dial(t.Context(), at, zmq.Options{Type: zmq.SUB, MaxMessage: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Recv(); !errors.Is(err, zmq.ErrTooLarge) {
			t.Errorf("%s: %v", name, err)
		}
		c.Close()
	}
}

func TestAHeartbeatIsAnswered(t *testing.T) {
	pong := make(chan []byte, 1)
	at := raw(t, func(c net.Conn) {
		_, _ = c.Write(append(publisherGreeting(), append([]byte{4, 9}, "\x04PING\x00\x0aab"...)...))
		var got []byte
		b := make([]byte, 256)
		for !bytes.Contains(got, []byte("\x04PONGab")) {
			n, err := c.Read(b)
			if err != nil {
				break
			}
			got = append(got, b[:n]...)
		}
		pong <- got
		_, _ = c.Write([]byte{0, 1, 'x'})
	})
	c, err := zmq.Dial(t.Context(), at, zmq.Options{Type: zmq.SUB})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if f := recv(t, c); string(f[0]) != "x" {
		t.Errorf("got %q", f)
	}
	if got := <-pong; !bytes.Contains(got, []byte("\x04PONGab")) {
		t.Errorf("answered %q", got)
	}
}

func TestWildcardsMeanTheEnginesHost(t *testing.T) {
	u, _ := url.Parse("http://engine-3:8000/v1")
	for in, want := range map[string]string{"tcp://*:5557": "tcp://engine-3:5557", "tcp://0.0.0.0:1": "tcp://engine-3:1", "tcp://[::]:1": "tcp://engine-3:1",
		"tcp://10.0.0.1:5": "tcp://10.0.0.1:5", "ipc:///tmp/x": "ipc:///tmp/x"} {
		if got := zmq.Resolve(in, u); got != want {
			t.Errorf("%s resolves to %s, want %s", in, got, want)
		}
	}
	for _, bad := range []string{"", "tcp://", "tcp://host", "udp://a:1", "inproc://x", "ipc://"} {
		if _, err := zmq.Dial(t.Context(), bad, zmq.Options{Type: zmq.SUB}); !errors.Is(err, zmq.ErrEndpoint) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func FuzzRecv(f *testing.F) {
	f.Add([]byte{1, 1, 'a', 0, 1, 'b'})
	f.Add([]byte{4, 7, 4, 'P', 'I', 'N', 'G', 0, 0})
	f.Fuzz(func(t *testing.T, tail []byte) {
		a, b := net.Pipe()
		go func() {
			defer b.Close()
			go func() { // whatever the other side says
				buf := make([]byte, 4096)
				for {
					if _, err := b.Read(buf); err != nil {
						return
					}
				}
			}()
			_, _ = b.Write(append(publisherGreeting(), tail...))
		}()
		c, err := zmq.Open(t.Context(), a, zmq.Options{Type: zmq.SUB, MaxMessage: 1 << 16})
		if err != nil {
			return
		}
		defer c.Close()
		for {
			frames, err := c.Recv()
			if err != nil {
				return
			}
			if len(frames) == 0 || len(frames) > 64 {
				t.Fatalf("%d frames", len(frames))
			}
		}
	})
}
