package kvevents

import (
	"bytes"
	"slices"
	"time"
)

// parking keeps stores behind unknown parents, bounded by their tokens.
type parking struct {
	by     map[uint64][]*waiting // by parent hash
	hashes map[uint64]*waiting   // by the hashes of their blocks
	order  []*waiting            // oldest first; taken ones stay until their turn
	tokens int
	n      int
}

type waiting struct {
	e    Event
	cost int
	at   time.Duration
	gone bool
}

func (p *parking) len() int { return p.n }

// oldest is how long the oldest one waits.
func (p *parking) oldest(now time.Duration) time.Duration {
	for len(p.order) > 0 && p.order[0].gone {
		p.order = p.order[1:]
	}
	if len(p.order) == 0 {
		return 0
	}
	return now - p.order[0].at
}

// add copies a store; false when others had to go for it.
func (p *parking) add(e *Event, now time.Duration, bound int) bool {
	if p.by == nil {
		p.by, p.hashes = map[uint64][]*waiting{}, map[uint64]*waiting{}
	}
	w := &waiting{e: *e, at: now, cost: len(e.Tokens) + 64*len(e.Hashes)}
	w.e.Hashes, w.e.Tokens = slices.Clone(e.Hashes), slices.Clone(e.Tokens)
	w.e.Second, w.e.Session, w.e.Ownership, w.e.Locality = nil, nil, nil, nil
	w.e.LoRA, w.e.Salt, w.e.Spec = bytes.Clone(e.LoRA), bytes.Clone(e.Salt), bytes.Clone(e.Spec)
	w.e.Extra = slices.Clone(e.Extra)
	for i := range w.e.Extra {
		texts := slices.Clone(w.e.Extra[i].Texts)
		for j := range texts {
			texts[j] = bytes.Clone(texts[j])
		}
		w.e.Extra[i].Texts = texts
	}
	p.by[e.Parent] = append(p.by[e.Parent], w)
	for _, h := range w.e.Hashes {
		p.hashes[h] = w
	}
	if len(p.order) > 2*p.n+64 {
		p.order = slices.DeleteFunc(p.order, func(w *waiting) bool { return w.gone })
	}
	p.order = append(p.order, w)
	p.tokens += w.cost
	p.n++
	ok := true
	for p.tokens > bound && len(p.order) > 0 {
		old := p.order[0]
		p.order = p.order[1:]
		if old.gone {
			continue
		}
		ok = false
		p.drop(old)
		list := slices.DeleteFunc(p.by[old.e.Parent], func(w *waiting) bool { return w == old })
		if p.by[old.e.Parent] = list; len(list) == 0 {
			delete(p.by, old.e.Parent)
		}
	}
	return ok
}

func (p *parking) drop(w *waiting) {
	w.gone = true
	p.tokens -= w.cost
	p.n--
	for _, h := range w.e.Hashes {
		if p.hashes[h] == w {
			delete(p.hashes, h)
		}
	}
}

// take gives what waits for a parent.
func (p *parking) take(parent uint64) []*waiting {
	list := p.by[parent]
	if list == nil {
		return nil
	}
	delete(p.by, parent)
	for _, w := range list {
		p.drop(w)
	}
	if p.n == 0 {
		*p = parking{}
	}
	return list
}

// remove strikes a block that was removed while its store was parked, and the
// blocks behind it in that store: they are a prefix of nothing any more.
func (p *parking) remove(h uint64) bool {
	w := p.hashes[h]
	if w == nil {
		return false
	}
	i := slices.Index(w.e.Hashes, h)
	for _, gone := range w.e.Hashes[i:] {
		if p.hashes[gone] == w {
			delete(p.hashes, gone)
		}
	}
	w.e.Hashes, w.e.Tokens = w.e.Hashes[:i], w.e.Tokens[:i*w.e.BlockSize]
	return true
}
