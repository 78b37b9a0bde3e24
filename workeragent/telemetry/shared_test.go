//go:build shared

package telemetry_test

import (
	"testing"

	"github.com/rollbus/rollbus/bench/shared"
)

func TestEverySharedFixtureReadsAsExpected(t *testing.T) {
	checkDir(t, shared.Path(t, "engine"))
}

func TestEverySharedLoadMessageReadsAsExpected(t *testing.T) {
	checkLoadMessages(t, shared.Path(t, "kvevents", "sglang_load.json"))
}
