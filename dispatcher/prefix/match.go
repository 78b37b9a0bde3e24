package prefix

// Hit is how many blocks of a prompt one engine holds, from the first one on.
// A block in several tiers counts in the quickest.
type Hit struct {
	Tag int // of the engine's registration
	GPU int
	CPU int
	SSD int
}

// Blocks is the length of the prefix.
func (h *Hit) Blocks() int { return h.GPU + h.CPU + h.SSD }

func (h *Hit) add(t Tier, n int) {
	switch t {
	case GPU:
		h.GPU += n
	case CPU:
		h.CPU += n
	default:
		h.SSD += n
	}
}

// scratch is a match's working memory, by engine id.
type scratch struct {
	seen []seen
	run  uint32 // number of the run in hand, over all matches
}

// seen is where one engine stands in a match.
type seen struct {
	run  uint32 // last run of blocks it holds
	hit  int32  // its place among the hits
	tier Tier   // its quickest in that run
}

// Match finds the longest prefix of a prompt at every trusted engine, in one
// walk. blocks are the prompt's chained hashes, first to last; the hits are
// appended to dst[:0], in no particular but always the same order.
//
// The walk goes from run to run of blocks with the same holders. The first
// Options.JumpFrom blocks are looked at one by one. Behind them a run's end is
// found by galloping and bisecting, which is exact under these conditions:
//
//  1. a hash names the whole prompt up to its block (it is chained);
//  2. an engine that holds a block holds all blocks before it, in tiers that do
//     not change and change back within a run;
//  3. this index has not forgotten blocks inside the run (its budget).
//
// Engines evict the tail of a prompt first, which gives 2. Where it fails, an
// engine may be credited with a hole it has, never with more than up to the
// last block of it that was looked at.
func (x *Index) Match(blocks []uint64, dst []Hit) []Hit {
	dst = dst[:0]
	x.stats.Lookups++
	w := &x.scratch
	w.begin(len(x.byID))
	for i := 0; i < len(blocks); {
		id := x.blocks.hit(blocks[i])
		if id == 0 {
			break
		}
		n := x.runEnd(blocks, i, id) - i
		w.run++
		if i == 0 {
			dst = x.first(id, n, dst)
		} else if !x.further(id, n, dst) {
			break
		}
		if len(dst) == 0 {
			break
		}
		i += n
	}
	if len(dst) > 0 {
		x.stats.Matched++
	}
	return dst
}

// begin makes room, and leaves a run's number between this match and the last.
func (w *scratch) begin(engines int) {
	if n := engines - len(w.seen); n > 0 {
		w.seen = append(w.seen, make([]seen, n)...)
	}
	if w.run > 1<<31 {
		clear(w.seen)
		w.run = 0
	}
	w.run++
}

// first lists the engines that hold the first run of blocks.
func (x *Index) first(id uint32, n int, dst []Hit) []Hit {
	w := &x.scratch
	for _, m := range x.sets.at(id).members {
		s := &x.slots[m]
		if s.state != slotLive {
			continue
		}
		e := &w.seen[s.engine]
		if e.run == w.run {
			dst[e.hit].better(e, s.tier, n)
			continue
		}
		*e = seen{run: w.run, hit: int32(len(dst)), tier: s.tier}
		dst = append(dst, Hit{Tag: x.tags[s.engine]})
		dst[e.hit].add(s.tier, n)
	}
	return dst
}

// further adds a run to the engines that held all runs before it. It looks at
// the holders of this run alone: those that ended earlier cost nothing more.
func (x *Index) further(id uint32, n int, dst []Hit) (some bool) {
	w := &x.scratch
	for _, m := range x.sets.at(id).members {
		s := &x.slots[m]
		if s.state != slotLive {
			continue
		}
		switch e := &w.seen[s.engine]; e.run {
		case w.run - 1:
			e.run, e.tier, some = w.run, s.tier, true
			dst[e.hit].add(s.tier, n)
		case w.run:
			dst[e.hit].better(e, s.tier, n)
		}
	}
	return some
}

// better moves a run's blocks to a quicker tier of the same engine.
func (h *Hit) better(e *seen, t Tier, n int) {
	if t < e.tier {
		h.add(e.tier, -n)
		h.add(t, n)
		e.tier = t
	}
}

// runEnd is the first block after i whose holders are not the set id.
func (x *Index) runEnd(blocks []uint64, i int, id uint32) int {
	j := i + 1
	limit := len(blocks)
	if x.opt.JumpFrom >= 0 {
		limit = min(limit, x.opt.JumpFrom)
	}
	for ; j < limit; j++ {
		if x.blocks.hit(blocks[j]) != id {
			return j
		}
	}
	if j >= len(blocks) {
		return j
	}
	// Gallop: blocks[j-1] has the set; find the first that has not.
	low, step := j-1, 1
	for {
		next := min(low+step, len(blocks)-1)
		if x.blocks.hit(blocks[next]) != id {
			return x.bisect(blocks, low, next, id)
		}
		if next == len(blocks)-1 {
			return len(blocks)
		}
		low, step = next, step*2
	}
}

// bisect: blocks[low] has the set, blocks[high] has not.
func (x *Index) bisect(blocks []uint64, low, high int, id uint32) int {
	for high-low > 1 {
		mid := low + (high-low)/2
		if x.blocks.hit(blocks[mid]) == id {
			low = mid
		} else {
			high = mid
		}
	}
	return high
}
