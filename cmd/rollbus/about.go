package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/subjects"
)

// version is set by the linker in releases.
var version = ""

func programVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "dev"
}

// Version prints the version.
type Version struct{}

// Run prints it.
func (Version) Run(a *app) error {
	v := struct {
		Version string `json:"version"`
		Core    int    `json:"core_version"`
		Schema  int    `json:"schema_version"`
		Go      string `json:"go"`
	}{programVersion(), core.Version, subjects.SchemaVersion, runtime.Version()}
	return a.printer().one(v, func() error {
		_, err := fmt.Fprintf(a.stdout, "rollbus %s (core %d, schema %d, %s)\n", v.Version, v.Core, v.Schema, v.Go)
		return err
	})
}

// Completion prints a shell's script, which asks this program for candidates.
type Completion struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

// Help shows how to use it.
func (Completion) Help() string {
	return "Example, for this shell only:\n  source <(rollbus completion bash)"
}

var completionScripts = map[string]string{
	"bash": `_rollbus() {
  local IFS=$'\n'
  COMPREPLY=($(rollbus __complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _rollbus rollbus
`,
	"zsh": `#compdef rollbus
_rollbus() {
  local -a candidates
  candidates=("${(@f)$(rollbus __complete -- "${words[@]:1:$((CURRENT-1))}" 2>/dev/null)}")
  compadd -a candidates
}
compdef _rollbus rollbus
`,
	"fish": `function __rollbus_complete
  set -l words (commandline -opc) (commandline -ct)
  rollbus __complete -- $words[2..-1] 2>/dev/null
end
complete -c rollbus -f -a '(__rollbus_complete)'
`,
}

// Run prints it.
func (c Completion) Run(a *app) error {
	_, err := fmt.Fprint(a.stdout, completionScripts[c.Shell])
	return err
}

// Complete prints what may stand in place of the last word.
type Complete struct {
	Words []string `arg:"" optional:"" passthrough:""`
}

// Run prints one candidate a line.
func (c Complete) Run(a *app) error {
	words := c.Words
	if len(words) > 0 && words[0] == "--" {
		words = words[1:]
	}
	last := ""
	if len(words) > 0 {
		last, words = words[len(words)-1], words[:len(words)-1]
	}
	for _, w := range candidates(a.kong.Model.Node, words, last) {
		if _, err := fmt.Fprintln(a.stdout, w); err != nil {
			return err
		}
	}
	return nil
}

func candidates(n *kong.Node, words []string, last string) []string {
	flags := slices.Clone(n.Flags)
	var waiting *kong.Flag // the flag whose value is being typed
	for _, w := range words {
		if waiting != nil {
			waiting = nil
			continue
		}
		if strings.HasPrefix(w, "-") {
			for _, f := range flags {
				if (w == "--"+f.Name || f.Short != 0 && w == "-"+string(f.Short)) && !f.IsBool() {
					waiting = f
				}
			}
			continue
		}
		for _, child := range n.Children {
			if child.Name == w {
				n, flags = child, append(flags, child.Flags...)
				break
			}
		}
	}
	var all []string
	switch {
	case waiting != nil:
		all = enumOf(waiting.Value)
	case strings.HasPrefix(last, "-"):
		for _, f := range flags {
			if !f.Hidden {
				all = append(all, "--"+f.Name)
			}
		}
	default:
		for _, child := range n.Children {
			if !child.Hidden && child.Type == kong.CommandNode {
				all = append(all, child.Name)
			}
		}
		for _, p := range n.Positional {
			all = append(all, enumOf(p)...)
		}
	}
	all = slices.DeleteFunc(all, func(w string) bool { return w == "" || !strings.HasPrefix(w, last) })
	slices.SortFunc(all, cmp.Compare[string])
	return slices.Compact(all)
}

func enumOf(v *kong.Value) []string {
	if v.Enum == "" {
		return nil
	}
	return v.EnumSlice()
}
