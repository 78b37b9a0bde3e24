package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/rollbus/rollbus/subjects"
)

// ContextCmd keeps addresses of clusters.
type ContextCmd struct {
	Add    ContextAdd    `cmd:"" help:"Keep the connection flags given here under a name; an old one of that name is replaced."`
	Use    ContextUse    `cmd:"" help:"Make one the default; without a name, none."`
	List   ContextList   `cmd:"" help:"List them."`
	Remove ContextRemove `cmd:"" help:"Forget one."`
}

// Help shows examples.
func (ContextCmd) Help() string {
	return `Examples:
  rollbus context add prod --server nats://nats-1:4222,nats://nats-2:4222 --creds ~/prod.creds --pool math
  rollbus context use prod
  rollbus --context lab get engines
What counts, first to last: a flag, its variable, the context, the default. A context chosen by
"use" does not count at all where --server or ROLLBUS_SERVER names a server: its credentials
are not for others.
Kept in $XDG_CONFIG_HOME/rollbus/contexts.json (~/.config without it), readable by you alone.`
}

// contextFlags are what a context can say.
var contextFlags = [...]string{"server", "creds", "nkey", "user", "password", "token", "inbox", "tls-ca", "tls-cert", "tls-key", "pool"}

// secretFlags are not printed.
var secretFlags = []string{"password", "token"}

// contextFile is where contexts are kept; empty = nowhere.
type contextFile string

// contexts is what stands in it.
type contexts struct {
	Current  string                       `json:"current,omitempty"`
	Contexts map[string]map[string]string `json:"contexts"` // name -> flag -> value
}

// contextsIn finds the file, as the XDG rules say.
func contextsIn(environ []string) contextFile {
	dir := xdg(environ, "XDG_CONFIG_HOME", ".config")
	if dir == "" {
		return ""
	}
	return contextFile(filepath.Join(dir, "contexts.json"))
}

// stateIn finds the folder for what daemons remember: systemd's for the unit,
// else the user's, "" when there is neither.
func stateIn(environ []string) string {
	if dirs := lookup(environ)["STATE_DIRECTORY"]; dirs != "" {
		dir, _, _ := strings.Cut(dirs, ":")
		return dir
	}
	return xdg(environ, "XDG_STATE_HOME", ".local/state")
}

// xdg is our folder below one of the user's, "" when nothing says where that is.
func xdg(environ []string, name, below string) string {
	vars := lookup(environ)
	dir := vars[name]
	if !filepath.IsAbs(dir) {
		if vars["HOME"] == "" {
			return ""
		}
		dir = filepath.Join(vars["HOME"], below)
	}
	return filepath.Join(dir, "rollbus")
}

func lookup(environ []string) map[string]string {
	vars := map[string]string{}
	for _, kv := range environ {
		if k, v, ok := strings.Cut(kv, "="); ok {
			vars[k] = v
		}
	}
	return vars
}

func (f contextFile) read() (contexts, error) {
	all := contexts{Contexts: map[string]map[string]string{}}
	if f == "" {
		return all, nil
	}
	b, err := os.ReadFile(string(f))
	if errors.Is(err, fs.ErrNotExist) {
		return all, nil
	}
	if err != nil {
		return all, coded(exitUsage, "contexts: %w", err)
	}
	if err := json.Unmarshal(b, &all); err != nil {
		return all, coded(exitUsage, "contexts: %s cannot be read: %w (mend it, or take it away and add them again)", f, err)
	}
	for name, c := range all.Contexts {
		for flag := range c {
			if !slices.Contains(contextFlags[:], flag) {
				return all, coded(exitUsage, "contexts: %s: context %s has %q: there are %s", f, name, flag, strings.Join(contextFlags[:], ", "))
			}
		}
	}
	return all, nil
}

func (f contextFile) write(all contexts) error {
	if f == "" {
		return coded(exitUsage, "contexts: neither HOME nor XDG_CONFIG_HOME says where to keep them")
	}
	b, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return fmt.Errorf("contexts: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(string(f)), 0o700); err != nil {
		return fmt.Errorf("contexts: %w", err)
	}
	// Written aside and moved: whoever reads it meanwhile reads it whole.
	tmp, err := os.CreateTemp(filepath.Dir(string(f)), "contexts-*") // mode 0600
	if err != nil {
		return fmt.Errorf("contexts: %w", err)
	}
	_, err = tmp.Write(append(b, '\n'))
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), string(f))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("contexts: %w", err), os.Remove(tmp.Name()))
	}
	return nil
}

// apart are the commands that no context is for: they have their own NATS, or
// none, or write contexts from what was said there alone.
var apart = [...]string{"context", "version", "completion", "__complete", "demo", "up", "engine"}

// named finds a context.
func (all contexts) named(name string) (map[string]string, error) {
	c, ok := all.Contexts[name]
	if !ok {
		return nil, coded(exitNotFound, "no context %q: `rollbus context list` shows those there are, `rollbus context add %s --server URL` makes it", name, name)
	}
	return c, nil
}

// inForce is what the context says that a command line runs with: the one that
// was asked for, else the current one unless a server was named.
func (f contextFile) inForce(ctx *kong.Context, environ map[string]string) (map[string]string, error) {
	asked, server := environ["context"], environ["server"] != ""
	for _, p := range ctx.Path {
		switch {
		case p.Command != nil && slices.Contains(apart[:], p.Command.Name):
			return nil, nil
		case p.Flag != nil && p.Flag.Name == "context":
			if v, ok := ctx.FlagValue(p.Flag).(string); ok {
				asked = v
			}
		case p.Flag != nil && p.Flag.Name == "server":
			server = true
		}
	}
	if asked == "" && server {
		return nil, nil
	}
	all, err := f.read()
	if err != nil {
		return nil, err
	}
	if asked == "" {
		asked = all.Current
	}
	if asked == "" {
		return nil, nil
	}
	return all.named(asked)
}

// ContextAdd keeps a context.
type ContextAdd struct {
	Name string `arg:"" help:"Its name."`
	Use  bool   `help:"Make it the default too."`
}

// Run keeps it.
func (c ContextAdd) Run(a *app) error {
	if err := subjects.CheckToken("context", c.Name); err != nil {
		return err
	}
	if _, err := a.opts.connection.options(); err != nil {
		return err
	}
	if _, err := a.pool(); err != nil {
		return err
	}
	all, err := a.saved.read()
	if err != nil {
		return err
	}
	o := a.opts
	said := map[string]string{
		"server": o.Server, "creds": o.Creds, "nkey": o.NKey, "user": o.User, "password": o.Password, "token": o.Token,
		"inbox": o.Inbox, "tls-ca": o.TLSCA, "tls-cert": o.TLSCert, "tls-key": o.TLSKey, "pool": o.Pool,
	}
	maps.DeleteFunc(said, func(_, v string) bool { return v == "" })
	all.Contexts[c.Name] = said
	if c.Use {
		all.Current = c.Name
	}
	if err := a.saved.write(all); err != nil {
		return err
	}
	a.say("context %s: %s, pool %s", c.Name, o.Server, o.Pool)
	return nil
}

// ContextUse chooses one.
type ContextUse struct {
	Name string `arg:"" optional:"" help:"Context; without one, none is the default."`
}

// Run chooses it.
func (c ContextUse) Run(a *app) error {
	all, err := a.saved.read()
	if err != nil {
		return err
	}
	if c.Name != "" {
		if _, err := all.named(c.Name); err != nil {
			return err
		}
	}
	all.Current = c.Name
	return a.saved.write(all)
}

// ContextRemove forgets one.
type ContextRemove struct {
	Name string `arg:"" help:"Context."`
}

// Run forgets it.
func (c ContextRemove) Run(a *app) error {
	all, err := a.saved.read()
	if err != nil {
		return err
	}
	if _, err := all.named(c.Name); err != nil {
		return err
	}
	delete(all.Contexts, c.Name)
	if all.Current == c.Name {
		all.Current = ""
	}
	return a.saved.write(all)
}

// ContextList lists them.
type ContextList struct{}

// contextRow is one of them, without secrets.
type contextRow struct {
	Name    string            `json:"name"`
	Current bool              `json:"current"`
	Says    map[string]string `json:"says"`
}

// Run lists them.
func (ContextList) Run(a *app) error {
	all, err := a.saved.read()
	if err != nil {
		return err
	}
	var rows []contextRow
	for _, name := range slices.Sorted(maps.Keys(all.Contexts)) {
		says := maps.Clone(all.Contexts[name])
		for _, s := range secretFlags {
			if says[s] != "" {
				says[s] = "(kept)"
			}
		}
		rows = append(rows, contextRow{Name: name, Current: name == all.Current, Says: says})
	}
	return list(a.printer(), []string{"CONTEXT", "CURRENT", "SERVER", "POOL", "+CREDS", "+USER", "+TLS-CA"}, rows, func(r contextRow) []string {
		current := ""
		if r.Current {
			current = "*"
		}
		return []string{r.Name, current, dash(r.Says["server"]), dash(r.Says["pool"]), dash(r.Says["creds"]), dash(r.Says["user"]), dash(r.Says["tls-ca"])}
	})
}
