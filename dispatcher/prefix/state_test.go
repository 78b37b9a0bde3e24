package prefix

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// troubled applies one random call to every index, and returns what the first said.
func troubled(rng *rand.Rand, now time.Duration, seq map[string]uint64, to []*Index) []string {
	var said []string
	n := fmt.Sprint("e", rng.IntN(9))
	first, count, tier := rng.Uint64N(60_000), 1+rng.Uint64N(40), Tier(rng.IntN(3))
	blocks := make([]uint64, 0, count)
	for i := range count {
		blocks = append(blocks, mix(first+i))
	}
	kind, epoch := rng.IntN(1000), fmt.Sprint("x", rng.IntN(30)/29)
	if kind >= 10 && kind < 700 {
		seq[n]++
		if rng.IntN(2000) == 0 {
			seq[n]++
		}
	}
	for _, x := range to {
		var v any
		switch {
		case kind < 1:
			x.Remove(n)
		case kind < 10:
			v = x.Put(Registration{Engine: n, Epoch: epoch, Events: true, Tag: int(n[1] - '0')})
		case kind < 600:
			v = x.Apply(now, Event{Engine: n, Epoch: "x0", Seq: seq[n], Op: Stored, Tier: tier, Blocks: blocks, Parent: mix(first - 1), HasParent: kind < 12})
		case kind < 700:
			v = x.Apply(now, Event{Engine: n, Epoch: "x0", Seq: seq[n], Op: Removed, Tier: tier, Blocks: blocks[:1]})
		case kind < 760:
			v = []Verdict{x.Put(Registration{Engine: n, Epoch: "x0", Events: true, Tag: int(n[1] - '0')}), x.Begin(n, "x0", seq[n]), x.Part(now, n, "x0", tier, blocks), x.End(now, n, "x0")}
		case kind < 800:
			x.Tick(now)
		default:
			v = x.Match(blocks, nil)
		}
		said = append(said, fmt.Sprint(v))
	}
	return said
}

func TestARestoredIndexAnswersAsTheOneItWasTakenFrom(t *testing.T) {
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 7))
		o := Options{LowerTTL: 200 * time.Millisecond, MaxBytes: 60 << 10, JumpFrom: 8, MaxBuffered: 400}
		x, seq := New(o), map[string]uint64{}
		all := []*Index{x}
		for step := range 12_000 {
			now := time.Duration(step) * time.Millisecond
			if step%1500 == 700 {
				b := x.AppendState(nil)
				y, err := RestoreIndex(o, b)
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(b, y.AppendState(nil)) {
					t.Fatalf("seed %d, step %d: it is written otherwise when read back", seed, step)
				}
				all = []*Index{x, y}
			}
			said := troubled(rng, now, seq, all)
			if len(said) == 2 && said[0] != said[1] {
				t.Fatalf("seed %d, step %d: %s, restored: %s", seed, step, said[0], said[1])
			}
		}
		if d := cmp.Diff(all[0].Stats(), all[1].Stats()); d != "" {
			t.Fatalf("seed %d: %s", seed, d)
		}
		if x.evicted == 0 || x.Stats().Trusted == 0 || x.Stats().Expired == 0 {
			t.Errorf("seed %d proves little: %+v", seed, x.Stats())
		}
	}
}

func TestADamagedStateIsRefusedOrHarmless(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	x, seq := New(Options{}), map[string]uint64{}
	for range 400 {
		troubled(rng, 0, seq, []*Index{x})
	}
	whole := x.AppendState(nil)
	for range 400 {
		b := bytes.Clone(whole)
		if rng.IntN(2) == 0 {
			b = b[:rng.IntN(len(b))]
		} else {
			b[rng.IntN(len(b))] ^= 1 << rng.IntN(8)
		}
		if y, err := RestoreIndex(Options{}, b); err == nil {
			y.Match([]uint64{1, 2, 3}, nil) // must return
		}
	}
	if _, err := RestoreIndex(Options{}, nil); err == nil {
		t.Error("nothing is taken for a state")
	}
}

// A field that is neither written nor named here as derived would be lost in a
// checkpoint, and a replay from it would decide otherwise.
func TestEveryFieldOfTheIndexIsInItsState(t *testing.T) {
	for _, c := range []struct {
		of      any
		written string
		derived string // from what is written, or without a part in any answer
	}{
		{Index{}, "blocks sets byID tags slots noSlots dead period evicted hand sweep stats", "opt engines scratch"},
		{Stats{}, "Stored Removed Expired Lookups Matched Resyncs", "Bytes Blocks Sets Engines Trusted Evicted Buffered"},
		{engine{}, "name epoch version versioned past state gpu lower heard asOf evicted relaxed asked buffer dropped", "id buffered"},
		{Event{}, "Seq Op Tier Parent HasParent Namespace Blocks", "Engine Epoch"},
		{slot{}, "engine tier state period", ""},
		{sweep{}, "on dying set place blocks", ""},
		{table{}, "dir depth segs", "n"},
		{segment{}, "keys vals used depth hand", "n"},
		{sets{}, "pages free byHash memo", "bytes"},
		{set{}, "refs listed members", "hash"},
		{move{}, "from slot to add ok", ""},
	} {
		typ := reflect.TypeOf(c.of)
		named := map[string]bool{}
		for _, n := range slices.Concat(words(c.written), words(c.derived)) {
			named[n] = true
		}
		for i := range typ.NumField() {
			if f := typ.Field(i).Name; !named[f] {
				t.Errorf("%s.%s is new: write it in AppendState, read it in RestoreIndex, and name it here", typ, f)
			}
		}
	}
}

func words(s string) []string { return strings.Fields(s) }
