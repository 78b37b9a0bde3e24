package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/alecthomas/kong"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Exit codes, the same for every command and stable.
const (
	exitOK          = 0
	exitNo          = 1   // the answer is no: a failed rollout, a broken guarantee, anything else
	exitUsage       = 2   // the command line, the environment or an input is wrong
	exitNotFound    = 3   // what was named does not exist
	exitAuth        = 4   // NATS refused the credentials, or what they may do
	exitUnavailable = 5   // NATS or JetStream cannot be reached in time
	exitInterrupted = 130 // ended by a signal before it was done
)

// codedError is an error that knows its exit code.
type codedError struct {
	code int
	err  error
}

func (e *codedError) Error() string { return e.err.Error() }
func (e *codedError) Unwrap() error { return e.err }

func coded(code int, format string, args ...any) error {
	return &codedError{code, fmt.Errorf(format, args...)}
}

// errInterrupted ends a command that a signal stopped.
var errInterrupted = errors.New("interrupted")

// exitCode maps an error to its code: its own, else by what it wraps.
func exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	if c, ok := errors.AsType[*codedError](err); ok {
		return c.code
	}
	if _, ok := errors.AsType[*kong.ParseError](err); ok {
		return exitUsage
	}
	is := func(targets ...error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}
	switch {
	case is(errInterrupted):
		return exitInterrupted
	case is(nats.ErrAuthorization, nats.ErrAuthExpired, nats.ErrPermissionViolation):
		return exitAuth
	case is(kvstate.ErrGone, jetstream.ErrStreamNotFound, jetstream.ErrBucketNotFound, jetstream.ErrKeyNotFound,
		jetstream.ErrMsgNotFound, jetstream.ErrConsumerNotFound):
		return exitNotFound
	case is(nats.ErrNoServers, nats.ErrReconnectBufExceeded, nats.ErrTimeout, nats.ErrNoResponders, nats.ErrConnectionClosed, nats.ErrDisconnected,
		jetstream.ErrJetStreamNotEnabled, jetstream.ErrNoStreamResponse, kvstate.ErrUnavailable, kvstate.ErrUnknown,
		client.ErrUnavailable, client.ErrUnknown, client.ErrBackpressure,
		context.DeadlineExceeded):
		return exitUnavailable
	case is(subjects.ErrBadName, subjects.ErrBadLayout, subjects.ErrInvalid, subjects.ErrTooLarge):
		return exitUsage
	}
	return exitNo
}
