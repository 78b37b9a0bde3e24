package main

import (
	"reflect"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

func TestEveryVariableIsAFlagOfSomeCommand(t *testing.T) {
	var grammar cli
	k, err := kong.New(&grammar, kong.Name("rollbus"))
	if err != nil {
		t.Fatal(err)
	}
	flags := map[string]bool{}
	var visit func(*kong.Node)
	visit = func(n *kong.Node) {
		for _, f := range n.Flags {
			flags[f.Name] = true
		}
		for _, c := range n.Children {
			visit(c)
		}
	}
	visit(k.Model.Node)
	for variable, flag := range flagOf() {
		if !flags[flag] {
			t.Errorf("%s is said to be the default of --%s, which no command has", variable, flag)
		}
	}
	if n := reflect.TypeFor[environment]().NumField(); n != len(flagOf()) {
		t.Errorf("%d fields, %d variables: two fields share a name", n, len(flagOf()))
	}
}

func TestAWrongEnvironmentIsRefusedWhole(t *testing.T) {
	for _, environ := range [][]string{
		{"ROLLBUS_SLOTS=many"}, {"ROLLBUS_TIMEOUT=soon"}, {"ROLLBUS_PULL=x"},
	} {
		_, err := readEnvironment(environ)
		if err == nil || exitCode(err) != exitUsage {
			t.Errorf("%v: want a usage error, got %v", environ, err)
		}
	}
	_, err := readEnvironment([]string{"ROLLBUS_SLOTS=many", "ROLLBUS_TIMEOUT=soon"})
	if err == nil || !strings.Contains(err.Error(), "Slots") || !strings.Contains(err.Error(), "Timeout") {
		t.Errorf("both bad values must be named, got %v", err)
	}
}

func TestTheEnvironmentIsTheDefaultAndAnEmptyValueIsNone(t *testing.T) {
	values, err := readEnvironment([]string{"ROLLBUS_POOL=math", "ROLLBUS_OUTPUT=", "HOME=/root", "ROLLBUS_TIMEOUT=3s"})
	if err != nil {
		t.Fatal(err)
	}
	if values["pool"] != "math" || values["timeout"] != "3s" || len(values) != 2 {
		t.Errorf("got %v", values)
	}
}
