package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// GetOwners lists the owner map.
type GetOwners struct{ watchFlags }

// Help shows an example.
func (GetOwners) Help() string {
	return `Examples:
  rollbus get owners
  rollbus get owners -o json
REACH is the part of the pool's slots that a key's requests may use now, and the part
that as many owners as there may be would give: the n largest engines (owner_ceiling).`
}

// ownerRow is one key.
type ownerRow struct {
	Key       string      `json:"key"`
	Owners    []ownerCell `json:"owners"`
	Counting  int         `json:"counting"`   // owners of this life and weight version of their engine
	Reach     float64     `json:"reach"`      // share of the pool's slots, 0..1
	ReachMost float64     `json:"reach_most"` // with owner_ceiling owners
	Seed      string      `json:"seed"`       // none, seed, cooldown
	Renewed   time.Time   `json:"renewed"`    // NATS server's clock
}

type ownerCell struct {
	subjects.Owner
	Counts bool   `json:"counts"`
	Why    string `json:"why,omitempty"` // why it does not count
	slots  int
}

// Run lists them.
func (c GetOwners) Run(a *app) error {
	head := []string{"KEY", ">OWNERS", "REACH", "AT MOST", "SEED", "ENGINES", "+PROOFS", "+RENEWED"}
	return listing(a, c.watchFlags, head, (*look).owners, func(r *ownerRow) []string {
		var engines, proofs []string
		for i := range r.Owners {
			o := &r.Owners[i]
			engines = append(engines, cmp.Or(strings.TrimSpace(o.Engine+" "+bracket(o.Why)), o.Engine))
			proofs = append(proofs, o.Proof.Rollout)
		}
		return []string{r.Key, strconv.Itoa(r.Counting), percent(r.Reach), percent(r.ReachMost), r.Seed,
			dash(strings.Join(engines, ", ")), dash(strings.Join(proofs, ", ")), stamp(r.Renewed)}
	})
}

func bracket(s string) string {
	if s == "" {
		return ""
	}
	return "(" + s + ")"
}

func percent(v float64) string { return fmt.Sprintf("%.0f%%", 100*v) }

func (l *look) owners() ([]*ownerRow, error) {
	entries, err := values[subjects.Ownership](l, subjects.Owners)
	if err != nil {
		return nil, err
	}
	engines, err := values[subjects.Engine](l, subjects.Engines)
	if err != nil {
		return nil, err
	}
	seeds, err := l.seeds()
	if err != nil {
		return nil, err
	}
	ceiling, err := l.ownerCeiling()
	if err != nil {
		return nil, err
	}
	var sizes []int
	total := 0
	for _, e := range engines {
		sizes = append(sizes, e.V.Slots)
		total += e.V.Slots
	}
	slices.SortFunc(sizes, func(a, b int) int { return b - a })
	most := 0
	for _, n := range sizes[:min(ceiling, len(sizes))] {
		most += n
	}
	share := func(n int) float64 { return float64(n) / float64(max(1, total)) }
	out := make([]*ownerRow, 0, len(entries))
	for _, v := range entries {
		r := &ownerRow{Key: v.Key, Seed: "none", ReachMost: share(most), Renewed: v.Stored, Owners: []ownerCell{}}
		reach := 0
		for _, o := range v.V.Owners {
			c := judgeOwner(o, engines)
			if c.Counts {
				r.Counting++
				reach += c.slots
			}
			r.Owners = append(r.Owners, c)
		}
		r.Reach = share(reach)
		if i := slices.IndexFunc(seeds, func(s *seedRow) bool { return s.Key == v.Key }); i >= 0 {
			r.Seed = string(seeds[i].State)
		}
		out = append(out, r)
	}
	return out, nil
}

func judgeOwner(o subjects.Owner, engines []kvstate.Value[subjects.Engine]) ownerCell {
	c := ownerCell{Owner: o, Why: "gone"}
	for _, v := range engines {
		e := v.V
		if e.Engine != o.Engine {
			continue
		}
		switch c.slots = e.Slots; {
		case e.Epoch != o.Epoch:
			c.Why = "another life"
		case (e.WeightVersion == nil) != (o.WeightVersion == nil) || e.WeightVersion != nil && *e.WeightVersion != *o.WeightVersion:
			c.Why = "other weights"
		default:
			c.Counts, c.Why = true, ""
			if e.State != subjects.EngineReady {
				c.Why = string(e.State) // it keeps its cache
			}
		}
	}
	return c
}

func (l *look) ownerCeiling() (int, error) {
	s, _, err := l.s.Settings(l.ctx)
	if err != nil && !errors.Is(err, kvstate.ErrGone) {
		return 0, err
	}
	set, err := policy.Resolve(s)
	if err != nil {
		return 0, err
	}
	return set.OwnerCeiling, nil
}

// GetSeeds lists seeds and cooldowns.
type GetSeeds struct{ watchFlags }

// Help shows an example.
func (GetSeeds) Help() string {
	return `Examples:
  rollbus get seeds
  rollbus get seeds --watch
A seed adds an owner to a key: it lives exactly as long as the reservation it was
written with. After its proof the key gets no other until the cooldown is over.`
}

// seedRow is what stands at one key.
type seedRow struct {
	subjects.Seed
	Revision uint64    `json:"revision"`
	Since    time.Time `json:"since"` // NATS server's clock
}

// Run lists them.
func (c GetSeeds) Run(a *app) error {
	head := []string{"KEY", "STATE", "ENGINE", "ROLLOUT", "SINCE", "DISPATCHER", "+EPOCH", "+>BIND", "+>REVISION"}
	return listing(a, c.watchFlags, head, (*look).seeds, func(r *seedRow) []string {
		return []string{r.Key, string(r.State), dash(r.Engine), r.Rollout(), stamp(r.Since), dash(r.Dispatcher), dash(oneLine(r.Epoch, 14)),
			strconv.Itoa(r.Bind), strconv.FormatUint(r.Revision, 10)}
	})
}

func (l *look) seeds() ([]*seedRow, error) {
	out := []*seedRow{}
	for m, err := range latest(l.ctx, l.js, l.bucket(subjects.Reservations), l.pool.SeedSubject("*"), true) {
		if err != nil {
			return nil, err
		}
		key, ok := l.pool.ParseSeedSubject(m.Subject())
		meta, merr := m.Metadata()
		if !ok || merr != nil || m.Headers().Get(subjects.HdrKVOperation) != "" {
			continue
		}
		if s, err := subjects.SeedFromHeader(key, m.Headers()); err == nil {
			out = append(out, &seedRow{Seed: s, Revision: meta.Sequence.Stream, Since: meta.Timestamp})
		}
	}
	slices.SortFunc(out, func(a, b *seedRow) int { return cmp.Compare(a.Key, b.Key) })
	return out, nil
}
