package policy_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/subjects"
)

// golden are the hashes of 2,000 decisions by each policy, every bit of every
// score included. They are the same on every machine; a change of a formula
// changes them, and core.Version with them.
var golden = map[string]uint64{
	policy.LeastRequests: 0x2819d168d3f8b163,
	policy.KVTokens:      0xaac0d3ad5d79bff2,
	policy.LoadSnapshot:  0x7e1b79bc29829d69,
	policy.WeightedCache: 0x9f772a874fe9a575,
	policy.ProjectedTime: 0x21a5ec0b814c02ce,
	policy.OwnerPressure: 0xe37970f6d0ed4045, // requests without an owner key; owner_test.go has the others
}

func TestScoresAreTheSameBitForBitOnEveryMachine(t *testing.T) {
	for _, name := range policy.Policies() {
		d := decider(t, name, subjects.ModeEnforce, knobs{"sticky_trajectory": 1, "wait_max": 2})
		rng := rand.New(rand.NewPCG(20, 26))
		h := xxhash.New()
		put := func(v uint64) {
			var b [8]byte
			binary.LittleEndian.PutUint64(b[:], v)
			_, _ = h.Write(b[:])
		}
		var rec policy.Record
		for range 2000 {
			cs := engines(1 + rng.IntN(12))
			silent := rng.IntN(3) == 0
			for i := range cs {
				c := &cs[i]
				c.ReservedRequests = rng.IntN(42)
				c.ReservedTokens = int64(c.ReservedRequests) * rng.Int64N(9000)
				c.ReservedPromptTokens = c.ReservedTokens / 3
				c.LastPicked = uint64(rng.IntN(5))
				c.MatchKnown, c.MatchGPU, c.MatchCPU, c.MatchSSD = rng.IntN(5) > 0, 64*rng.IntN(30), 64*rng.IntN(9), 64*rng.IntN(9)
				c.Sticky = rng.IntN(20) == 0
				if !silent {
					c.Observed = &policy.Observed{
						Running: rng.IntN(40), Waiting: rng.IntN(20), WaitingUncachedTokens: rng.Int64N(20_000), UsedTokens: rng.Int64N(900_000),
						KVUsageWorst: rng.Float64(), MaxRunning: 38, DecodeTokS: 5000 * rng.Float64(), PrefillTokS: 50_000 * rng.Float64(),
					}
					o := c.Observed
					o.PendingTold, o.PendingPrefillTokens, o.PendingOutputTokens = len(cs)%2 == 0, o.UsedTokens%9000, o.UsedTokens%7000
				}
			}
			in := input(cs, request())
			in.Now = time.Minute
			in.Request.PromptTokens = 1 + rng.IntN(4000)
			if rng.IntN(2) == 0 {
				in.Request.Affinity = fmt.Sprint("g", rng.IntN(50))
			}
			put(uint64(d.Decide(in, &rec)))
			_, _ = h.WriteString(string(rec.Reason))
			for i := range rec.Candidates {
				put(uint64(rec.Candidates[i].Index))
				put(math.Float64bits(rec.Candidates[i].Score))
				for p, v := range rec.Candidates[i].Parts() {
					put(uint64(p))
					put(math.Float64bits(v))
				}
			}
		}
		if got := h.Sum64(); got != golden[name] {
			t.Errorf("%s: the decisions hash to %#x, want %#x", name, got, golden[name])
		}
	}
}
