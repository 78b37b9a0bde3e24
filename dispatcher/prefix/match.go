package prefix

// Hit is how many blocks of a prompt one engine holds, from the first one on.
// A block in several tiers counts in the quickest.
type Hit struct {
	Engine string
	Tag    int
	GPU    int
	CPU    int
	SSD    int
}

// Blocks is the length of the prefix.
func (h Hit) Blocks() int { return h.GPU + h.CPU + h.SSD }

// scratch is a match's working memory, by engine id.
type scratch struct {
	mark   []uint32 // number of the run that last had the engine
	run    uint32
	tier   []Tier // its quickest tier in that run
	hits   []Hit
	active []uint32
	all    []uint32
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
	if len(blocks) == 0 {
		return dst
	}
	w := &x.scratch
	w.fit(len(x.byID))
	w.all = w.all[:0]
	for i := 0; i < len(blocks); {
		id := x.blocks.hit(blocks[i])
		if id == 0 {
			break
		}
		n := x.runEnd(blocks, i, id) - i
		w.run++
		x.markHolders(id, i == 0)
		if i == 0 {
			w.active = append(w.active[:0], w.all...)
		} else {
			kept := w.active[:0]
			for _, e := range w.active {
				if w.mark[e] == w.run {
					kept = append(kept, e)
				}
			}
			w.active = kept
		}
		if len(w.active) == 0 {
			break
		}
		for _, e := range w.active {
			h := &w.hits[e]
			switch w.tier[e] {
			case GPU:
				h.GPU += n
			case CPU:
				h.CPU += n
			default:
				h.SSD += n
			}
		}
		i += n
	}
	for _, e := range w.all {
		if h := w.hits[e]; h.Blocks() > 0 {
			h.Engine, h.Tag = x.byID[e].name, x.byID[e].tag
			dst = append(dst, h)
		}
		w.hits[e] = Hit{}
	}
	if len(dst) > 0 {
		x.stats.Matched++
	}
	return dst
}

func (w *scratch) fit(engines int) {
	for len(w.mark) < engines {
		w.mark, w.tier, w.hits = append(w.mark, 0), append(w.tier, 0), append(w.hits, Hit{})
	}
	if w.run > 1<<31 {
		clear(w.mark)
		w.run = 0
	}
}

// markHolders notes which engines of the set count, and their quickest tier; of
// the first run it lists them too.
func (x *Index) markHolders(id uint32, first bool) {
	w := &x.scratch
	for _, m := range x.sets.at(id).members {
		s := &x.slots[m]
		switch {
		case s.state != slotLive:
		case w.mark[s.engine] != w.run:
			w.mark[s.engine], w.tier[s.engine] = w.run, s.tier
			if first {
				w.all = append(w.all, s.engine)
			}
		case s.tier < w.tier[s.engine]:
			w.tier[s.engine] = s.tier
		}
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
