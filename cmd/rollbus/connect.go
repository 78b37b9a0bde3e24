package main

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate"
)

// connection says which NATS, and as whom.
type connection struct {
	Server   string `default:"nats://127.0.0.1:4222" short:"s" help:"NATS servers, comma separated." placeholder:"URL"`
	Creds    string `type:"existingfile" help:"File with a user's JWT and key." placeholder:"FILE"`
	NKey     string `name:"nkey" type:"existingfile" help:"File with a user's NKey seed." placeholder:"FILE"`
	User     string `help:"User." placeholder:"NAME"`
	Password string `help:"Password of the user; better in ROLLBUS_PASSWORD." placeholder:"TEXT"`
	Token    string `help:"Token instead of a user; better in ROLLBUS_TOKEN." placeholder:"TEXT"`
	Inbox    string `help:"Prefix of the subjects at which NATS answers, where the credential allows no other (rollbus auth)." placeholder:"PREFIX"`
	TLSCA    string `name:"tls-ca" type:"existingfile" help:"Certificates to trust." placeholder:"FILE"`
	TLSCert  string `name:"tls-cert" type:"existingfile" help:"Own certificate; needs --tls-key." placeholder:"FILE"`
	TLSKey   string `name:"tls-key" type:"existingfile" help:"Key of --tls-cert." placeholder:"FILE"`
}

func (c *connection) options() ([]nats.Option, error) {
	var o []nats.Option
	if c.Creds != "" {
		o = append(o, nats.UserCredentials(c.Creds))
	}
	if c.NKey != "" {
		key, err := nats.NkeyOptionFromSeed(c.NKey)
		if err != nil {
			return nil, coded(exitUsage, "--nkey %s: %w", c.NKey, err)
		}
		o = append(o, key)
	}
	switch {
	case c.Password != "" && c.User == "":
		return nil, coded(exitUsage, "--password without --user: name the user too")
	case c.Token != "" && c.User != "":
		return nil, coded(exitUsage, "--token and --user: give one of them")
	case c.User != "":
		o = append(o, nats.UserInfo(c.User, c.Password))
	case c.Token != "":
		o = append(o, nats.Token(c.Token))
	}
	if c.Inbox != "" {
		o = append(o, nats.CustomInboxPrefix(c.Inbox))
	}
	if c.TLSCA != "" {
		o = append(o, nats.RootCAs(c.TLSCA))
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return nil, coded(exitUsage, "--tls-cert and --tls-key: give both or none")
	}
	if c.TLSCert != "" {
		o = append(o, nats.ClientCert(c.TLSCert, c.TLSKey))
	}
	return o, nil
}

// connect reaches NATS once, for a tool: it fails when NATS is away.
func (a *app) connect() (*nats.Conn, error) {
	o, err := a.opts.options()
	if err != nil {
		return nil, err
	}
	nc, err := nats.Connect(a.opts.Server, append(o,
		nats.Name("rollbus tool"), nats.Timeout(min(a.opts.Timeout, 5*time.Second)), nats.MaxReconnects(-1),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { a.say("rollbus: NATS: %v", err) }),
	)...)
	if err == nil {
		return nc, nil
	}
	return nil, a.unreached(err, "start one with `rollbus up`, or name another with --server")
}

// connectDaemon never gives up: a daemon outlives NATS. Whether NATS is there at
// the start is for reached to say.
func (a *app) connectDaemon(name string) (*nats.Conn, error) {
	o, err := a.opts.options()
	if err != nil {
		return nil, err
	}
	log := a.log()
	nc, err := nats.Connect(a.opts.Server, append(o,
		nats.Name(name), nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true), nats.ReconnectBufSize(-1),
		nats.ReconnectWait(250*time.Millisecond), nats.ReconnectJitter(250*time.Millisecond, time.Second),
		nats.ConnectHandler(func(nc *nats.Conn) { log.Info("NATS connected", "server", nc.ConnectedUrlRedacted()) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { log.Warn("NATS connection lost", "err", err) }),
		nats.ReconnectHandler(func(nc *nats.Conn) { log.Info("NATS connected", "server", nc.ConnectedUrlRedacted()) }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { log.Warn("NATS", "err", err) }),
	)...)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS at %s: %w", a.opts.Server, err)
	}
	if !nc.IsConnected() {
		log.Warn("waiting for NATS", "server", redacted(a.opts.Server), "err", nc.LastError())
	}
	return nc, nil
}

// redacted is a list of servers without the secrets in it.
func redacted(servers string) string {
	all := strings.Split(servers, ",")
	for i, s := range all {
		if s = strings.TrimSpace(s); !strings.Contains(s, "://") {
			s = "nats://" + s
		}
		u, err := url.Parse(s)
		if err != nil {
			all[i] = "?"
			continue
		}
		if u.User != nil {
			u.User = url.User("xxxxx") // a token stands there too
		}
		all[i] = u.String()
	}
	return strings.Join(all, ",")
}

// reached waits for a daemon's first connection by --timeout, so that one that
// needs NATS to begin says what is wrong and leaves trying again to its
// supervisor.
func (a *app) reached(nc *nats.Conn) error {
	change := nc.StatusChanged(nats.CONNECTED, nats.CLOSED)
	defer nc.RemoveStatusListener(change)
	late := time.NewTimer(a.opts.Timeout)
	defer late.Stop()
	for !nc.IsConnected() {
		select {
		case <-change:
			if !nc.IsClosed() {
				continue
			}
		case <-late.C:
		case <-a.ctx.Done():
			return fmt.Errorf("%w before NATS at %s was reached", errInterrupted, a.opts.Server)
		}
		if !nc.IsConnected() {
			return a.unreached(cmp.Or(nc.LastError(), nats.ErrNoServers), "start NATS, or name another with --server; --timeout waits longer")
		}
	}
	return nil
}

// unreached tells a NATS that is away from one that refuses the credentials.
func (a *app) unreached(err error, next string) error {
	if errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired) {
		return coded(exitAuth, "NATS at %s refuses the credentials: %w (give --creds, --nkey, --user or --token)", a.opts.Server, err)
	}
	return coded(exitUnavailable, "cannot reach NATS at %s: %w (%s)", a.opts.Server, err, next)
}

// store opens the pool on a tool's connection. The caller closes it with done.
func (a *app) store() (s *kvstate.Store, done func(), err error) {
	pool, err := a.pool()
	if err != nil {
		return nil, nil, err
	}
	nc, err := a.connect()
	if err != nil {
		return nil, nil, err
	}
	s, err = kvstate.Open(nc, pool)
	if err != nil {
		nc.Close()
		return nil, nil, fmt.Errorf("open pool %s: %w", pool, err)
	}
	return s, nc.Close, nil
}

// noPool explains a missing stream: most often the pool was never made.
func (a *app) noPool(err error) error {
	if errors.Is(err, jetstream.ErrStreamNotFound) || errors.Is(err, jetstream.ErrBucketNotFound) || errors.Is(err, nats.ErrNoResponders) {
		return coded(exitNotFound, "pool %s does not exist at %s: %w (make it with `rollbus pool init`, or name another with --pool)",
			a.opts.Pool, a.opts.Server, err)
	}
	return err
}

// stdinOrFile opens a file, "-" being standard input.
func (a *app) stdinOrFile(name string) (r interface{ Read([]byte) (int, error) }, done func(), err error) {
	if name == "-" {
		return a.stdin, func() {}, nil
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, nil, coded(exitUsage, "%w", err)
	}
	return f, func() { _ = f.Close() }, nil
}
