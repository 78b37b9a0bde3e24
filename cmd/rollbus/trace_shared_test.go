//go:build shared

package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/rollbus/rollbus/bench/shared"
)

// The main job on real input: both public traces go through a whole pool, and
// everything in them is answered once.
func TestThePublicTracesRunThroughAWholePool(t *testing.T) {
	for _, name := range []string{"mooncake_synthetic_trace.jsonl", "mooncake_conversation_head2000.jsonl"} {
		t.Run(name, func(t *testing.T) {
			var out, said bytes.Buffer
			args := []string{"demo", "--trace", shared.Path(t, "traces", name), "--limit", "400", "--shrink", "8",
				"--dispatchers", "2", "--target", "8", "--no-progress", "-o", "json"}
			if code := run(t.Context(), args, nil, strings.NewReader(""), &out, &said); code != exitOK {
				t.Fatalf("exit %d\n%s%s", code, out.String(), said.String())
			}
			var r struct {
				Submitted, Completed, Failed, Lost, Duplicated int
				Cached                                         float64 `json:"cached_prompt_fraction"`
			}
			if err := json.Unmarshal(out.Bytes(), &r); err != nil {
				t.Fatalf("%v in %s", err, out.String())
			}
			if r.Submitted != 400 || r.Completed != 400 || r.Failed+r.Lost+r.Duplicated != 0 {
				t.Errorf("report: %+v", r)
			}
			if r.Cached <= 0 || r.Cached >= 1 {
				t.Errorf("%g of the prompts were cached: want some", r.Cached)
			}
		})
	}
}
