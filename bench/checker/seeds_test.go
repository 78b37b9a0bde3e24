package checker

import (
	"strings"
	"testing"

	"github.com/rollbus/rollbus/subjects"
)

func (s *script) seed(key, engine, id string, n int, guard uint64) *script {
	s.rev++
	s.h.Seeds = append(s.h.Seeds, Seed{Revision: s.rev, Stored: s.now(), Key: key, Guard: guard, Put: &subjects.Seed{
		Key: key, State: subjects.SeedLive, Engine: engine, Job: "j", ID: id, Bind: n, Epoch: "x"}})
	return s.bind(engine, id, n)
}

func (s *script) endSeed(key string, guard uint64, state subjects.SeedState) *script {
	s.rev++
	e := Seed{Revision: s.rev, Stored: s.now(), Key: key, Guard: guard}
	if state != "" {
		e.Put = &subjects.Seed{Key: key, State: state, Engine: "e1", Job: "j", ID: "a", Bind: 1}
	}
	s.h.Seeds = append(s.h.Seeds, e)
	return s
}

func (s *script) own(key, engine, id string, n int) *script {
	s.h.Owned = append(s.h.Owned, Owned{Revision: uint64(len(s.h.Owned) + 1), Key: key, Owners: []subjects.Owner{
		{Engine: engine, Epoch: "x", Proof: subjects.Proof{Rollout: "j." + id, Bind: n}}}})
	return s
}

// seeded is one whole seed of key k on e1 by rollout a: revisions 1 to 4.
func seeded() *script {
	return newScript().submit("a").seed("k", "e1", "a", 1, 0).answer("e1", "a", 1).release("e1", "a", 1).own("k", "e1", "a", 1).endSeed("k", 1, subjects.SeedCooldown)
}

func TestWhatTheCheckerSaysOfSeedsAndOwners(t *testing.T) {
	for name, c := range map[string]struct {
		make func() *script
		want string // in the only violation; empty = none
	}{
		"a whole seed": {seeded, ""},
		"a second after the cooldown": {func() *script {
			return seeded().submit("b").seed("k", "e2", "b", 1, 0).answer("e2", "b", 1).release("e2", "b", 1).endSeed("k", 5, "")
		}, ""},
		"two live seeds of a key": {func() *script {
			return newScript().submit("a").submit("b").seed("k", "e1", "a", 1, 0).seed("k", "e2", "b", 1, 1).
				answer("e1", "a", 1).release("e1", "a", 1).answer("e2", "b", 1).release("e2", "b", 1).endSeed("k", 3, "")
		}, "while its seed by j.a at revision 1 was live"},
		"two live seeds of an engine": {func() *script {
			return newScript().submit("a").submit("b").seed("k", "e1", "a", 1, 0).seed("l", "e1", "b", 1, 0).
				answer("e1", "a", 1).release("e1", "a", 1).answer("e1", "b", 1).release("e1", "b", 1).endSeed("k", 1, "").endSeed("l", 3, "")
		}, "e1 became the target of a seed of key l"},
		"a seed left behind": {func() *script {
			return newScript().submit("a").seed("k", "e1", "a", 1, 0).answer("e1", "a", 1).release("e1", "a", 1)
		}, "was left behind"},
		"a seed without its reservation": {func() *script {
			s := newScript().submit("a")
			s.rev++
			s.h.Seeds = append(s.h.Seeds, Seed{Revision: s.rev, Key: "k", Put: &subjects.Seed{State: subjects.SeedLive, Engine: "e1", Job: "j", ID: "a", Bind: 1}})
			return s.endSeed("k", 1, "").bind("e1", "a", 1).answer("e1", "a", 1).release("e1", "a", 1)
		}, "has no reservation of rollout j.a on e1 behind it"},
		"an end without its guard": {func() *script {
			s := seeded()
			s.h.Seeds[1].Unguarded = true
			return s
		}, "without its guard"},
		"an owner whose proof failed": {func() *script {
			s := seeded()
			s.h.Results[0].Status = subjects.Failed
			return s
		}, "which was answered as failed"},
		"an owner without usage": {func() *script {
			s := seeded()
			s.h.Results[0].CompletionTokens = nil
			return s
		}, "by bind 1 of rollout j.a"},
		"an owner by nothing":          {func() *script { return seeded().own("k", "e2", "z", 1) }, "which was never answered"},
		"an owner by another's answer": {func() *script { return seeded().own("k", "e2", "a", 1) }, "e2 (epoch x) owns key k"},
	} {
		var texts []string
		for _, v := range Check(c.make().h) {
			texts = append(texts, v.String())
		}
		all := strings.Join(texts, "\n")
		if c.want == "" && all != "" || c.want != "" && (len(texts) != 1 || !strings.HasPrefix(all, "I4: ") || !strings.Contains(all, c.want)) {
			t.Errorf("%s: want %q, got %d:\n%s", name, c.want, len(texts), all)
		}
	}
}
