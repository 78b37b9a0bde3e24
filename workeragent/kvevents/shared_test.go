//go:build shared

package kvevents

import (
	"testing"

	"github.com/rollbus/rollbus/bench/shared"
)

func TestEverySharedFixtureReadsAsExpected(t *testing.T) {
	dir := shared.Path(t, "kvevents")
	t.Run("payloads", func(t *testing.T) { checkPayloads(t, dir) })
	t.Run("frames", func(t *testing.T) { checkFrames(t, dir) })
	t.Run("sequences", func(t *testing.T) { checkStories(t, dir) })
	t.Run("vectors", func(t *testing.T) { checkVectors(t, dir) })
}
