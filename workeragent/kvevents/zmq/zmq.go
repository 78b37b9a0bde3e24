// Package zmq speaks as much of ZeroMQ as following an engine takes: ZMTP 3.0
// over TCP or a unix socket, without encryption, one connection a socket, as SUB
// or DEALER, dialled or accepted (some publishers dial). PUB and ROUTER exist for
// fakes and tests.
//
// The general Go library (go-zeromq/zmq4) is not used to receive: it waits
// without end for the greeting of a peer that does not speak, allocates whatever
// length a frame claims, and leaves goroutines behind that nobody reads from. A
// port that engines share with other programs meets all three. Here every frame
// is bounded, every handshake has a deadline, and a connection has no goroutine.
//
// A Conn fails once and for ever: reconnecting is its user's, with a new Conn.
package zmq

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"time"
)

// Type of a socket.
type Type string

// Socket types.
const (
	SUB    Type = "SUB"
	DEALER Type = "DEALER"
	PUB    Type = "PUB"
	ROUTER Type = "ROUTER"
)

// peers that a type may talk to.
var peers = map[Type][]string{SUB: {"PUB", "XPUB"}, DEALER: {"ROUTER", "DEALER", "REP"}, PUB: {"SUB", "XSUB"}, ROUTER: {"DEALER", "REQ", "ROUTER"}}

var (
	// ErrPeer is a peer that speaks something else: another protocol, another
	// version, a socket type that does not fit.
	ErrPeer = errors.New("zmq: the peer is no socket that fits")
	// ErrTooLarge is a message beyond the bound.
	ErrTooLarge = errors.New("zmq: message too large")
	// ErrEndpoint is an endpoint that cannot be used.
	ErrEndpoint = errors.New("zmq: want tcp://host:port or ipc://path")
)

// Options of a connection; zero = the default.
type Options struct {
	Type Type
	// Subscribe to topics that begin so, for SUB. Nil = everything.
	Subscribe []string
	// MaxMessage bounds all frames of a message, bytes. Default 64 MiB.
	MaxMessage int
	// Handshake bounds connecting and greeting. Default 5 s.
	Handshake time.Duration
	// Write bounds one Send. Default 5 s.
	Write time.Duration
}

func (o Options) withDefaults() Options {
	if o.MaxMessage <= 0 {
		o.MaxMessage = 64 << 20
	}
	if o.Handshake <= 0 {
		o.Handshake = 5 * time.Second
	}
	if o.Write <= 0 {
		o.Write = 5 * time.Second
	}
	return o
}

// maxFrames bounds the frames of a message.
const maxFrames = 64

// Conn is one connection after its handshake. Recv and Send may run at the same
// time, each on one goroutine; Close ends both.
type Conn struct {
	c    net.Conn
	r    *bufio.Reader
	opts Options
	peer string

	wmu sync.Mutex
	w   []byte
}

// split gives network and address of an endpoint.
func split(endpoint string) (network, addr string, err error) {
	if path, ok := strings.CutPrefix(endpoint, "ipc://"); ok && path != "" {
		return "unix", path, nil
	}
	host, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", "", fmt.Errorf("%w: %q", ErrEndpoint, endpoint)
	}
	if _, port, err := net.SplitHostPort(host); err != nil || port == "" {
		return "", "", fmt.Errorf("%w: %q", ErrEndpoint, endpoint)
	}
	return "tcp", host, nil
}

// Wildcard tells whether an endpoint means every interface: a socket there was
// bound, and others dial it.
func Wildcard(endpoint string) bool {
	_, addr, err := split(endpoint)
	if err != nil || strings.HasPrefix(endpoint, "ipc://") {
		return false
	}
	host, _, _ := net.SplitHostPort(addr)
	return host == "*" || host == "" || host == "0.0.0.0" || host == "::"
}

// Resolve puts the host of the engine's own URL in the place of a wildcard.
func Resolve(endpoint string, engine *url.URL) string {
	if !Wildcard(endpoint) {
		return endpoint
	}
	_, addr, _ := split(endpoint)
	_, port, _ := net.SplitHostPort(addr)
	return "tcp://" + net.JoinHostPort(engine.Hostname(), port)
}

var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// Dial connects once. It does not retry.
func Dial(ctx context.Context, endpoint string, opts Options) (*Conn, error) {
	opts = opts.withDefaults()
	network, addr, err := split(endpoint)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, opts.Handshake)
	defer cancel()
	d := net.Dialer{KeepAliveConfig: keepAlive}
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, fmt.Errorf("zmq: %s: %w", endpoint, err)
	}
	return open(ctx, c, opts)
}

// Listener accepts connections on an endpoint that publishers dial.
type Listener struct {
	l    net.Listener
	opts Options
}

// Listen binds. The host "*" is every interface.
func Listen(ctx context.Context, endpoint string, opts Options) (*Listener, error) {
	network, addr, err := split(endpoint)
	if err != nil {
		return nil, err
	}
	if Wildcard(endpoint) {
		_, port, _ := net.SplitHostPort(addr)
		addr = net.JoinHostPort("", port)
	}
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	l, err := lc.Listen(ctx, network, addr)
	if err != nil {
		return nil, fmt.Errorf("zmq: %s: %w", endpoint, err)
	}
	return &Listener{l: l, opts: opts.withDefaults()}, nil
}

// Addr is where it listens.
func (l *Listener) Addr() net.Addr { return l.l.Addr() }

// Close ends Accept.
func (l *Listener) Close() error { return l.l.Close() }

// Accept waits for the next peer whose handshake succeeds; others are passed over.
func (l *Listener) Accept(ctx context.Context) (*Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = l.l.Close() })
	defer stop()
	for {
		c, err := l.l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			return nil, fmt.Errorf("zmq: accept: %w", err)
		}
		shake, cancel := context.WithTimeout(ctx, l.opts.Handshake)
		conn, err := open(shake, c, l.opts)
		cancel()
		if err == nil {
			return conn, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
	}
}

// Open greets on a connection that exists; on failure it closes it.
func Open(ctx context.Context, c net.Conn, opts Options) (*Conn, error) {
	return open(ctx, c, opts.withDefaults())
}

func open(ctx context.Context, c net.Conn, opts Options) (*Conn, error) {
	conn := &Conn{c: c, r: bufio.NewReaderSize(c, 64<<10), opts: opts}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	err := conn.handshake()
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("zmq: %s: %w", c.RemoteAddr(), err)
	}
	if err := conn.subscribe(); err != nil {
		_ = c.Close()
		return nil, err
	}
	return conn, nil
}

// greeting: signature, version 3.0, mechanism NULL, no server.
func greeting() []byte {
	g := make([]byte, 64)
	g[0], g[9], g[10] = 0xff, 0x7f, 3
	copy(g[12:], "NULL")
	return g
}

func (c *Conn) handshake() error {
	ready := []byte("\x05READY")
	ready = property(ready, "Socket-Type", string(c.opts.Type))
	if c.opts.Type == DEALER || c.opts.Type == ROUTER {
		ready = property(ready, "Identity", "")
	}
	if _, err := c.c.Write(append(greeting(), frame(nil, flagCommand, ready)...)); err != nil {
		return err
	}
	var g [64]byte
	if _, err := io.ReadFull(c.r, g[:10]); err != nil {
		return err
	}
	if g[0] != 0xff || g[9]&1 == 0 {
		return fmt.Errorf("%w: it does not greet in ZMTP", ErrPeer)
	}
	if _, err := io.ReadFull(c.r, g[10:]); err != nil {
		return err
	}
	if g[10] < 3 {
		return fmt.Errorf("%w: ZMTP %d, want 3", ErrPeer, g[10])
	}
	if mech := strings.TrimRight(string(g[12:32]), "\x00"); mech != "NULL" {
		return fmt.Errorf("%w: mechanism %q, want NULL", ErrPeer, mech)
	}
	flags, body, err := c.readFrame(4096)
	if err != nil {
		return err
	}
	if flags&flagCommand == 0 {
		return fmt.Errorf("%w: no READY", ErrPeer)
	}
	return c.checkReady(body)
}

func property(b []byte, name, value string) []byte {
	b = append(append(b, byte(len(name))), name...)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
}

func (c *Conn) checkReady(body []byte) error {
	rest, ok := strings.CutPrefix(string(body), "\x05READY")
	if !ok {
		if text, ok := strings.CutPrefix(string(body), "\x05ERROR"); ok {
			return fmt.Errorf("%w: it says %.80q", ErrPeer, text)
		}
		return fmt.Errorf("%w: no READY", ErrPeer)
	}
	for len(rest) > 0 {
		n := int(rest[0])
		if len(rest) < 1+n+4 {
			return fmt.Errorf("%w: broken READY", ErrPeer)
		}
		name, size := rest[1:1+n], binary.BigEndian.Uint32([]byte(rest[1+n:5+n]))
		rest = rest[5+n:]
		if uint64(size) > uint64(len(rest)) {
			return fmt.Errorf("%w: broken READY", ErrPeer)
		}
		if strings.EqualFold(name, "Socket-Type") {
			c.peer = rest[:size]
		}
		rest = rest[size:]
	}
	for _, p := range peers[c.opts.Type] {
		if p == c.peer {
			return nil
		}
	}
	return fmt.Errorf("%w: a %q for a %s", ErrPeer, c.peer, c.opts.Type)
}

func (c *Conn) subscribe() error {
	if c.opts.Type != SUB {
		return nil
	}
	topics := c.opts.Subscribe
	if topics == nil {
		topics = []string{""}
	}
	for _, t := range topics { // as ZMTP 3.0 does it: a message
		if err := c.Send(append([]byte{1}, t...)); err != nil {
			return err
		}
	}
	return nil
}

// Flags of a frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// frame appends one encoded frame.
func frame(dst []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		dst = binary.BigEndian.AppendUint64(append(dst, flags|flagLong), uint64(len(body)))
	} else {
		dst = append(dst, flags, byte(len(body)))
	}
	return append(dst, body...)
}

// readFrame reads one frame of at most room bytes.
func (c *Conn) readFrame(room int) (flags byte, body []byte, err error) {
	var head [9]byte
	if _, err := io.ReadFull(c.r, head[:2]); err != nil {
		return 0, nil, err
	}
	size := uint64(head[1])
	if head[0]&flagLong != 0 {
		if _, err := io.ReadFull(c.r, head[2:]); err != nil {
			return 0, nil, err
		}
		size = binary.BigEndian.Uint64(head[1:])
	}
	if size > uint64(max(room, 0)) {
		return 0, nil, fmt.Errorf("%w: a frame of %d bytes, %d allowed", ErrTooLarge, size, room)
	}
	body = make([]byte, size)
	_, err = io.ReadFull(c.r, body)
	return head[0], body, err
}

// Recv gives the next message. It blocks until there is one or Close; the
// frames are the caller's.
func (c *Conn) Recv() ([][]byte, error) {
	frames := make([][]byte, 0, 4)
	room := c.opts.MaxMessage
	for {
		flags, body, err := c.readFrame(room)
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if err := c.command(body); err != nil {
				return nil, err
			}
			continue
		}
		room -= len(body)
		if frames = append(frames, body); len(frames) > maxFrames {
			return nil, fmt.Errorf("%w: more than %d frames", ErrTooLarge, maxFrames)
		}
		if flags&flagMore == 0 {
			return frames, nil
		}
	}
}

// command answers a heartbeat; other commands mean nothing here.
func (c *Conn) command(body []byte) error {
	if text, ok := strings.CutPrefix(string(body), "\x05ERROR"); ok {
		return fmt.Errorf("%w: it says %.80q", ErrPeer, text)
	}
	const ping, ttl = "\x04PING", 2
	if len(body) < len(ping)+ttl || string(body[:len(ping)]) != ping {
		return nil
	}
	return c.write(frame(nil, flagCommand, append([]byte("\x04PONG"), body[len(ping)+ttl:]...)))
}

// Send writes one message.
func (c *Conn) Send(frames ...[]byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.w = c.w[:0]
	for i, f := range frames {
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		c.w = frame(c.w, flags, f)
	}
	return c.writeLocked(c.w)
}

// Encode appends a message as it stands on the wire, for a sender that collects
// many and writes them with Write.
func Encode(dst []byte, frames ...[]byte) []byte {
	for i, f := range frames {
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		dst = frame(dst, flags, f)
	}
	return dst
}

// Write sends messages that Encode made.
func (c *Conn) Write(encoded []byte) error { return c.write(encoded) }

func (c *Conn) write(b []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	return c.writeLocked(b)
}

func (c *Conn) writeLocked(b []byte) error {
	if err := c.c.SetWriteDeadline(time.Now().Add(c.opts.Write)); err != nil {
		return err
	}
	_, err := c.c.Write(b)
	return err
}

// SetReadDeadline bounds the next Recv; the zero time lifts the bound.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.c.SetReadDeadline(t) }

// RemoteAddr is the peer's.
func (c *Conn) RemoteAddr() net.Addr { return c.c.RemoteAddr() }

// Close ends the connection. It may be called more than once.
func (c *Conn) Close() error { return c.c.Close() }
