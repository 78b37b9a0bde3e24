package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/rollbus/rollbus/subjects"
)

const deployDir = "../../deploy"

func TestEveryVariableOfTheExampleEnvironmentsIsOne(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(deployDir, "systemd", "*.env.example"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no example environments: %v", err)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var environ []string
		for line := range strings.Lines(string(b)) {
			line = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(line), "#"))
			if strings.HasPrefix(line, envPrefix) {
				if v, found := strings.CutSuffix(line, "="); found {
					line = v + "=x" // switched off and empty in the example
				}
				environ = append(environ, line)
			}
		}
		if len(environ) < 5 {
			t.Errorf("%s sets only %v", name, environ)
		}
		if _, err := readEnvironment(environ); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTheNATSConfigurationsAreAcceptedAndSafe(t *testing.T) {
	t.Setenv("SERVER_NAME", "nats-1")
	for _, name := range []string{"single.conf", "cluster.conf"} {
		o, err := server.ProcessConfigFile(filepath.Join(deployDir, "nats", name))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if !o.SyncAlways {
			t.Errorf("%s: a write may be acknowledged before it is on the disk: sync_interval must be always", name)
		}
		if o.MaxPayload != subjects.MaxPayload {
			t.Errorf("%s: max_payload is %d, want %d", name, o.MaxPayload, subjects.MaxPayload)
		}
		if need := (subjects.Layout{}).WithDefaults().Budget; o.JetStreamMaxStore < need {
			t.Errorf("%s: max_file_store of %d does not hold one pool of %d", name, o.JetStreamMaxStore, need)
		}
		if name == "cluster.conf" && len(o.Routes) != 3 {
			t.Errorf("%s: %d routes, want three", name, len(o.Routes))
		}
	}
}

func TestTheUnitsRunCommandsThatExistAndGiveThemTimeToStop(t *testing.T) {
	for _, daemon := range []string{"dispatcher", "agent"} {
		b, err := os.ReadFile(filepath.Join(deployDir, "systemd", "rollbus-"+daemon+".service"))
		if err != nil {
			t.Fatal(err)
		}
		unit := string(b)
		for _, want := range []string{
			"ExecStart=/usr/local/bin/rollbus " + daemon + "\n", "EnvironmentFile=/etc/rollbus/" + daemon + ".env\n",
			"Type=notify\n", "NoNewPrivileges=yes\n", "ProtectSystem=strict\n", "User=rollbus\n", "CapabilityBoundingSet=\n",
		} {
			if !strings.Contains(unit, want) {
				t.Errorf("the unit of the %s lacks %q", daemon, want)
			}
		}
	}
}
