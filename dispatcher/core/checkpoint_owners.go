package core

import (
	"fmt"
	"slices"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// OwnersState is what is known of owners and seeds.
type OwnersState struct {
	Keys      []OwnerKeyState // by name
	Attended  []string        // sorted
	Seen      uint64
	MapSeen   uint64
	KeysSwept time.Duration
	Kept      int
}

// OwnerKeyState is one owner key. Its reservations are in Held.
type OwnerKeyState struct {
	Name       string
	Entry      *OwnerPut
	Marker     uint64
	Seed       *SeedState
	Flight     uint64 // handle; 0 = none
	AwaitSeq   uint64
	AwaitUntil time.Duration
	Struck     []StrikeState
	First      *subjects.Owner
	Refresh    bool
	Acting     string
	ActingAt   uint64
	Writing    []subjects.Owner
	WritingWhy string
	GivingBack bool
	Ending     subjects.Seed
	EndingWhy  string
	Since      time.Duration
	Waiting    bool
	Next       time.Duration
}

// StrikeState is an owner that counts no more.
type StrikeState struct{ Engine, Epoch string }

// SeedState is what stands at a key's seed.
type SeedState struct {
	Put     SeedPut
	Gone    bool
	Unseen  bool
	Retired bool
	Proof   *subjects.Owner
	Why     string
	Absent  bool
	Missing time.Duration
}

var ownerActs = []string{actNone: "", actSeed: "seed", actOwners: "owners"}

func (b *ownerBook) state() OwnersState {
	s := OwnersState{Attended: sortedKeys(b.attended), Seen: b.seen, MapSeen: b.mapSeen, KeysSwept: b.keysSwept, Kept: b.kept}
	for _, name := range sortedKeys(b.keys) {
		k := b.keys[name]
		x := OwnerKeyState{
			Name: name, Entry: k.entry, Marker: k.marker, AwaitSeq: k.awaitSeq, AwaitUntil: k.awaitUntil, First: k.first, Refresh: k.refresh,
			Acting: ownerActs[k.acting], ActingAt: k.actingAt, Writing: k.writing, WritingWhy: k.writingWhy, GivingBack: k.givingBack, Ending: k.ending, EndingWhy: k.endingWhy,
			Since: k.since, Waiting: k.waiting, Next: k.next,
		}
		if p := k.seed; p != nil {
			x.Seed = &SeedState{p.SeedPut, p.gone, p.unseen, p.retired, p.proof, p.why, p.absent, p.missing}
		}
		if k.flight != nil {
			x.Flight = uint64(k.flight.h)
		}
		for _, st := range k.struck {
			x.Struck = append(x.Struck, StrikeState{st.engine, st.epoch})
		}
		s.Keys = append(s.Keys, x)
	}
	return s
}

// restoreOwners comes after messages in hand, engines and reservations.
func (c *Core) restoreOwners(s *OwnersState) error {
	for i := range s.Keys {
		x := &s.Keys[i]
		act := slices.Index(ownerActs, x.Acting)
		if c.keys[x.Name] != nil || act < 0 {
			return fmt.Errorf("owner key %s", x.Name)
		}
		k := c.ownerKey(x.Name)
		*k = ownerKey{
			name: x.Name, marker: x.Marker, awaitSeq: x.AwaitSeq, awaitUntil: x.AwaitUntil, first: x.First, refresh: x.Refresh,
			acting: acting(act), actingAt: x.ActingAt, writing: x.Writing, writingWhy: x.WritingWhy, givingBack: x.GivingBack, ending: x.Ending, endingWhy: x.EndingWhy,
			since: x.Since, waiting: x.Waiting, next: x.Next,
		}
		for _, st := range x.Struck {
			k.struck = append(k.struck, strike{st.Engine, st.Epoch})
		}
		if x.Entry != nil {
			entry := *x.Entry
			c.setEntry(k, &entry)
		}
		if p := x.Seed; p != nil {
			c.setSeed(k, &seedEntry{p.Put, p.Gone, p.Unseen, p.Retired, p.Proof, p.Why, p.Absent, p.Missing})
		}
		if x.Flight != 0 {
			var err error
			if k.flight, err = c.inHand(x.Flight, "owner key "+x.Name); err != nil {
				return err
			}
			c.flying[k.flight.engine] = true
		}
	}
	for _, name := range sortedKeys(c.held) {
		for _, h := range c.held[name] {
			if h.OwnerKey != "" {
				k := c.ownerKey(h.OwnerKey)
				k.held = append(k.held, h)
			}
		}
	}
	for _, name := range s.Attended {
		c.attended[name] = true
	}
	c.seen, c.mapSeen, c.keysSwept, c.kept = s.Seen, s.MapSeen, s.KeysSwept, s.Kept
	return nil
}
