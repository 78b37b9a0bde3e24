package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/rollbus/rollbus/subjects"
)

// AuthCmd prints what a credential needs.
type AuthCmd struct {
	Dispatcher AuthDispatcher `cmd:"" help:"Print the permissions of a dispatcher."`
	Agent      AuthAgent      `cmd:"" help:"Print the permissions of an agent and its engines."`
	Trainer    AuthTrainer    `cmd:"" help:"Print the permissions of one reader of one job."`
}

// Help shows examples.
func (AuthCmd) Help() string {
	return `Examples:
  rollbus auth dispatcher d1
  rollbus auth agent node7-gpu0 node7-gpu1 --pool math
  rollbus auth trainer math --reader main -o json
It prints a user as NATS reads it (authorization { users: [ ... ] }), its password from the environment, or the bare
lists as JSON. It talks to nobody. Each user has an inbox of its own: give it to the program with --inbox (ROLLBUS_INBOX).`
}

// AuthDispatcher prints a dispatcher's permissions.
type AuthDispatcher struct {
	Name string `arg:"" help:"Name that the dispatcher is started with."`
}

// Run prints them.
func (c AuthDispatcher) Run(a *app) error {
	return a.credential([][2]string{{"dispatcher", c.Name}}, func(p subjects.Pool) subjects.Permissions { return p.DispatcherPermissions(c.Name) })
}

// AuthAgent prints an agent's permissions.
type AuthAgent struct {
	Engines []string `arg:"" help:"Names of its engines."`
}

// Run prints them.
func (c AuthAgent) Run(a *app) error {
	var names [][2]string
	for _, e := range c.Engines {
		names = append(names, [2]string{"engine", e})
	}
	return a.credential(names, func(p subjects.Pool) subjects.Permissions { return p.AgentPermissions(c.Engines...) })
}

// AuthTrainer prints a trainer's permissions.
type AuthTrainer struct {
	Job    string `arg:"" help:"Job that it submits."`
	Reader string `default:"main" help:"Which of the job's readers it is." placeholder:"NAME"`
}

// Run prints them.
func (c AuthTrainer) Run(a *app) error {
	return a.credential([][2]string{{"job", c.Job}, {"reader", c.Reader}}, func(p subjects.Pool) subjects.Permissions { return p.TrainerPermissions(c.Job, c.Reader) })
}

// credential is a user as it is printed.
type credential struct {
	User  string `json:"user"`
	Inbox string `json:"inbox"`
	subjects.Permissions
}

// credential checks names, field and value, and prints a user called after the first.
func (a *app) credential(names [][2]string, of func(subjects.Pool) subjects.Permissions) error {
	pool, err := a.pool()
	if err != nil {
		return coded(exitUsage, "%w", err)
	}
	for _, n := range names {
		if err := subjects.CheckToken(n[0], n[1]); err != nil {
			return coded(exitUsage, "%w", err)
		}
	}
	user := names[0][1]
	c := credential{User: user, Inbox: subjects.InboxPrefix(user), Permissions: of(pool)}
	return a.printer().one(c, func() error { return c.conf(a.stdout) })
}

// conf prints it for a NATS configuration.
func (c credential) conf(w io.Writer) error {
	var b strings.Builder
	variable := "NATS_PASSWORD_" + strings.ToUpper(strings.ReplaceAll(c.User, "-", "_"))
	fmt.Fprintf(&b, "# inbox %s\n{ user: %q, password: $%s, permissions: {\n", c.Inbox, c.User, variable)
	list := func(what string, subjects []string) {
		fmt.Fprintf(&b, "  %s: { allow: [\n", what)
		for _, s := range subjects {
			fmt.Fprintf(&b, "    %q\n", s)
		}
		b.WriteString("  ] }\n")
	}
	list("publish", c.Publish)
	list("subscribe", c.Subscribe)
	if c.Responses {
		// An engine's whole block set, in parts, to whoever asks for it.
		fmt.Fprintf(&b, "  allow_responses: { max: %d, expires: %q }\n", subjects.MaxResponses, subjects.ResponseTime)
	}
	b.WriteString("} }\n")
	_, err := io.WriteString(w, b.String())
	return err
}
