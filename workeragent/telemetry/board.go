package telemetry

import "time"

// StalePush is how old a pushed load may be: engines send on change and at
// least each second, and are silent in a long prefill.
const StalePush = 3 * time.Second

// Board keeps the newest pushed load of each rank of one engine. A rank whose
// port is advertised and silent is not on it, so the sample is incomplete and
// the engine has to be polled. Not safe for concurrent use.
type Board struct {
	ranks map[int]posted
}

type posted struct {
	load LoadStat
	seq  uint64
	at   time.Duration
}

// Put takes a message of the rank whose socket it came from. A sequence that
// falls back is a restarted publisher; the same one again is dropped. A rank in
// the payload that is not the socket's is refused: two engines share a port.
func (b *Board) Put(rank int, seq uint64, l LoadStat, at time.Duration) (restarted, ok bool) {
	if l.Source == SourceLoadStat && l.InPayload != nil && *l.InPayload != int64(rank) {
		return false, false
	}
	if b.ranks == nil {
		b.ranks = map[int]posted{}
	}
	old, seen := b.ranks[rank]
	if seen && seq == old.seq {
		return false, true
	}
	b.ranks[rank] = posted{load: l, seq: seq, at: at}
	return seen && seq < old.seq, true
}

// Remove forgets a rank, for a subscription that ended.
func (b *Board) Remove(rank int) { delete(b.ranks, rank) }

// Sample is what the ranks said in the last three seconds. age is that of the
// oldest of them.
func (b *Board) Sample(now time.Duration, advertised *int) (s Sample, age time.Duration) {
	s = Sample{Source: SourceLoadStat, Advertised: advertised}
	for n, p := range b.ranks {
		if now-p.at > StalePush {
			continue
		}
		age = max(age, now-p.at)
		s.Source = p.load.Source
		r, problems := p.load.Rank(n)
		*s.rank(n) = r
		for _, q := range problems {
			s.problem(q.Rank, q.Field, "%s", q.Text)
		}
	}
	return s, age
}
