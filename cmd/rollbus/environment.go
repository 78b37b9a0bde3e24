package main

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"
	"github.com/caarlos0/env/v11"
)

// envPrefix starts every variable that rollbus reads.
const envPrefix = "ROLLBUS_"

// environment is every variable that rollbus reads, each the default of the
// flag of that name wherever a command has it. Flags override.
type environment struct {
	Context    string        `env:"CONTEXT" flag:"context"`
	Server     string        `env:"SERVER" flag:"server"`
	Creds      string        `env:"CREDS" flag:"creds"`
	NKey       string        `env:"NKEY" flag:"nkey"`
	User       string        `env:"USER" flag:"user"`
	Password   string        `env:"PASSWORD" flag:"password"`
	Token      string        `env:"TOKEN" flag:"token"`
	Inbox      string        `env:"INBOX" flag:"inbox"`
	TLSCA      string        `env:"TLS_CA" flag:"tls-ca"`
	TLSCert    string        `env:"TLS_CERT" flag:"tls-cert"`
	TLSKey     string        `env:"TLS_KEY" flag:"tls-key"`
	Timeout    time.Duration `env:"TIMEOUT" flag:"timeout"`
	Pool       string        `env:"POOL" flag:"pool"`
	Job        string        `env:"JOB" flag:"job"`
	Reader     string        `env:"READER" flag:"reader"`
	Output     string        `env:"OUTPUT" flag:"output"`
	Name       string        `env:"NAME" flag:"name"`
	Engine     string        `env:"ENGINE" flag:"engine"`
	Model      string        `env:"MODEL" flag:"model"`
	APIKey     string        `env:"API_KEY" flag:"api-key"`
	Slots      int           `env:"SLOTS" flag:"slots"`
	HTTP       string        `env:"HTTP" flag:"http"`
	Replicas   int           `env:"REPLICAS" flag:"replicas"`
	Storage    string        `env:"STORAGE" flag:"storage"`
	Data       string        `env:"DATA" flag:"data"`
	StateDir   string        `env:"STATE_DIR" flag:"state-dir"`
	Drain      time.Duration `env:"DRAIN_TIMEOUT" flag:"drain-timeout"`
	LogLevel   string        `env:"LOG_LEVEL" flag:"log-level"`
	LogFormat  string        `env:"LOG_FORMAT" flag:"log-format"`
	NoProgress bool          `env:"NO_PROGRESS" flag:"no-progress"`
}

// flagOf maps each variable to its flag.
func flagOf() map[string]string {
	flags := map[string]string{}
	t := reflect.TypeFor[environment]()
	for i := range t.NumField() {
		flags[envPrefix+t.Field(i).Tag.Get("env")] = t.Field(i).Tag.Get("flag")
	}
	return flags
}

// readEnvironment checks what is set and returns it by flag. All that is wrong
// is in one error; a ROLLBUS_ variable that nothing reads is wrong too.
func readEnvironment(environ []string) (map[string]string, error) {
	given := map[string]string{}
	flags := flagOf()
	var unknown []string
	for _, kv := range environ {
		k, v, ok := strings.Cut(kv, "=")
		if !ok || !strings.HasPrefix(k, envPrefix) || v == "" {
			continue
		}
		given[k] = v
		if _, known := flags[k]; !known {
			unknown = append(unknown, k)
		}
	}
	if len(unknown) > 0 {
		return nil, coded(exitUsage, "environment: %s: no such variable, see `rollbus help environment`", strings.Join(unknown, ", "))
	}
	if _, err := env.ParseAsWithOptions[environment](env.Options{Environment: given, Prefix: envPrefix}); err != nil {
		return nil, coded(exitUsage, "environment: %w", err)
	}
	values := map[string]string{}
	for k, v := range given {
		values[flags[k]] = v
	}
	return values, nil
}

// resolver gives flags that the command line leaves open what the environment
// says, else what the context in force says.
func resolver(values map[string]string, saved contextFile) kong.Resolver {
	return kong.ResolverFunc(func(ctx *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
		if v, ok := values[flag.Name]; ok {
			return v, nil
		}
		if !slices.Contains(contextFlags[:], flag.Name) {
			return nil, nil //nolint:nilnil // kong's contract: nil = not set here
		}
		in, err := saved.inForce(ctx, values)
		if err != nil {
			return nil, err
		}
		if v := in[flag.Name]; v != "" {
			return v, nil
		}
		return nil, nil //nolint:nilnil // the same
	})
}

// variables describes the environment for help.
func variables(app *kong.Application) string {
	help := map[string]string{}
	var visit func(*kong.Node)
	visit = func(n *kong.Node) {
		for _, f := range n.Flags {
			if help[f.Name] == "" {
				help[f.Name] = f.Help
			}
		}
		for _, c := range n.Children {
			visit(c)
		}
	}
	visit(app.Node)
	var b strings.Builder
	t := reflect.TypeFor[environment]()
	for i := range t.NumField() {
		name, flag := t.Field(i).Tag.Get("env"), t.Field(i).Tag.Get("flag")
		fmt.Fprintf(&b, "  %-22s --%-14s %s\n", envPrefix+name, flag, help[flag])
	}
	return b.String()
}
