package main

import "testing"

func TestWhatDaemonsRememberIsWhereTheMachineSays(t *testing.T) {
	for want, environ := range map[string][]string{
		"/var/lib/rollbus-agent": {"STATE_DIRECTORY=/var/lib/rollbus-agent:/var/lib/b", "XDG_STATE_HOME=/x", "HOME=/h"},
		"/x/rollbus":             {"XDG_STATE_HOME=/x", "HOME=/h"},
		"/h/.local/state/rollbus": {
			"XDG_STATE_HOME=relative", "HOME=/h"},
		"": nil,
	} {
		if got := stateIn(environ); got != want {
			t.Errorf("%v: %q, want %q", environ, got, want)
		}
	}
}
