package kvevents

import (
	"context"
	"time"

	"github.com/rollbus/rollbus/workeragent/kvevents/zmq"
)

// Socket is one ZeroMQ connection. Close ends Recv.
type Socket interface {
	Recv() ([][]byte, error)
	Send(frames ...[]byte) error
	SetReadDeadline(time.Time) error
	Close() error
}

// Acceptor gives the publishers that dial a bound endpoint.
type Acceptor interface {
	Accept(context.Context) (Socket, error)
	Close() error
}

// Sockets makes them; tests put their own in the place of the network.
type Sockets interface {
	// Subscribe dials a publisher.
	Subscribe(ctx context.Context, endpoint, topic string) (Socket, error)
	// Bind waits for publishers that dial.
	Bind(ctx context.Context, endpoint, topic string) (Acceptor, error)
	// Ask dials a replay endpoint.
	Ask(ctx context.Context, endpoint string) (Socket, error)
}

// Network is the real thing.
type Network struct{}

// Subscribe implements Sockets.
func (Network) Subscribe(ctx context.Context, endpoint, topic string) (Socket, error) {
	c, err := zmq.Dial(ctx, endpoint, zmq.Options{Type: zmq.SUB, Subscribe: []string{topic}})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Bind implements Sockets.
func (Network) Bind(ctx context.Context, endpoint, topic string) (Acceptor, error) {
	l, err := zmq.Listen(ctx, endpoint, zmq.Options{Type: zmq.SUB, Subscribe: []string{topic}})
	if err != nil {
		return nil, err
	}
	return acceptor{l}, nil
}

// Ask implements Sockets.
func (Network) Ask(ctx context.Context, endpoint string) (Socket, error) {
	c, err := zmq.Dial(ctx, endpoint, zmq.Options{Type: zmq.DEALER})
	if err != nil {
		return nil, err
	}
	return c, nil
}

type acceptor struct{ *zmq.Listener }

func (a acceptor) Accept(ctx context.Context) (Socket, error) {
	c, err := a.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	return c, nil
}
