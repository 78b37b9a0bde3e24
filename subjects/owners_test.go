package subjects_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/rollbus/rollbus/subjects"
)

func TestASeedSurvivesTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := subjects.Seed{
			Key: "0123456789abcdef", State: rapid.SampledFrom([]subjects.SeedState{subjects.SeedLive, subjects.SeedCooldown}).Draw(t, "state"),
			Engine: "e1", Job: "j", ID: "0001", Bind: rapid.IntRange(1, subjects.MaxBind).Draw(t, "bind"), Epoch: anyText().Draw(t, "epoch"),
			WeightVersion: maybe(rapid.Int64Range(0, 1<<40)).Draw(t, "version"), Anchor: rapid.Uint64().Draw(t, "anchor"), Dispatcher: token().Draw(t, "dispatcher"),
		}
		out, err := subjects.SeedFromHeader(in.Key, overTheWire(t, in.Header()))
		if d := cmp.Diff(in, out); d != "" || err != nil {
			t.Fatal(d, err)
		}
	})
}

func TestWhatIsNoSeedIsRefused(t *testing.T) {
	good := subjects.Seed{State: subjects.SeedLive, Engine: "e1", Job: "j", ID: "1", Bind: 1}
	for name, value := range map[string]string{
		subjects.HdrState: "bound", subjects.HdrEngine: "_e", subjects.HdrRollout: "j", subjects.HdrBind: "-1",
		subjects.HdrAnchor: "xyz", subjects.HdrWeightVersion: "new",
	} {
		h := good.Header()
		h.Set(name, value)
		if _, err := subjects.SeedFromHeader("k", h); err == nil {
			t.Errorf("%s: %q is taken", name, value)
		}
	}
}

func TestSeedSubjectsAreNoReservationsAndReadBack(t *testing.T) {
	p, err := subjects.NewPool("p")
	if err != nil {
		t.Fatal(err)
	}
	const key = "00000000000000ff"
	if got, ok := p.ParseSeedSubject(p.SeedSubject(key)); !ok || got != key {
		t.Errorf("%s reads back as %q", p.SeedSubject(key), got)
	}
	if _, _, _, ok := p.ParseReservationSubject(p.SeedSubject(key)); ok {
		t.Error("a seed reads as a reservation")
	}
	if _, ok := p.ParseSeedSubject(p.ReservationSubject("e1", "j", "1")); ok {
		t.Error("a reservation reads as a seed")
	}
	if _, ok := p.ParseSeedSubject(p.SeedSubject("short")); ok {
		t.Error("a key that OwnerKey never gives is taken")
	}
}

func TestAnOwnerKeyIsThatOfTheFirstAnchorTokensInTheirNamespace(t *testing.T) {
	s := subjects.Settings{AnchorTokens: 128, BlockTokens: 64}
	f := subjects.Facts{Job: "j", Namespace: 9, BlockTokens: 64, Blocks: []uint64{1, 2, 3}}
	key, anchor := subjects.OwnerKey(&f, s)
	if key != "0000000000000002" || anchor != 2 {
		t.Errorf("key %s, anchor %d: want those of the second block", key, anchor)
	}
	short := f
	short.Blocks = f.Blocks[:1]
	if key, anchor := subjects.OwnerKey(&short, s); key != "0000000000000001" || anchor != 1 {
		t.Errorf("a prompt of one block: key %s, anchor %d", key, anchor)
	}
	for name, change := range map[string]func(f *subjects.Facts){
		"no whole block":      func(f *subjects.Facts) { f.Blocks = nil },
		"hashes of no use":    func(f *subjects.Facts) { f.BlockTokens = 32 },
		"neither of the both": func(f *subjects.Facts) { f.Blocks, f.BlockTokens = nil, 0 },
	} {
		x := f
		change(&x)
		if key, anchor := subjects.OwnerKey(&x, s); key != "" || anchor != 0 {
			t.Errorf("%s: key %q, anchor %d: want none", name, key, anchor)
		}
	}
	named := f
	named.Affinity = "p 7"
	a, anchor := subjects.OwnerKey(&named, s)
	if err := subjects.CheckOwnerKey(a); err != nil || anchor != 2 {
		t.Errorf("with an affinity: key %q, anchor %d, %v", a, anchor, err)
	}
	for _, change := range []func(f *subjects.Facts){
		func(f *subjects.Facts) { f.Job = "k" }, func(f *subjects.Facts) { f.Namespace = 8 }, func(f *subjects.Facts) { f.Affinity = "p 8" },
	} {
		x := named
		change(&x)
		if b, _ := subjects.OwnerKey(&x, s); b == a {
			t.Errorf("%+v has the key of %+v", x, named)
		}
	}
}
