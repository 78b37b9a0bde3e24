package dispatcher

import "container/heap"

// due is when a queued message is past its deadline, on the server's clock.
type due struct {
	at  int64 // unix ns
	seq uint64
}

// dueHeap gives the earliest first.
type dueHeap []due

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].at < h[j].at }
func (h dueHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *dueHeap) Push(x any)        { *h = append(*h, x.(due)) }
func (h *dueHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

func (h *dueHeap) add(d due) { heap.Push(h, d) }

// next pops an entry that is due.
func (h *dueHeap) next(now int64) (d due, ok bool) {
	if len(*h) == 0 || (*h)[0].at > now {
		return due{}, false
	}
	return heap.Pop(h).(due), true
}

// prune drops what stands before the first message of the stream.
func (h *dueHeap) prune(first uint64) {
	kept := (*h)[:0]
	for _, d := range *h {
		if d.seq >= first {
			kept = append(kept, d)
		}
	}
	*h = kept
	heap.Init(h)
}
