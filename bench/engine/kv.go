package engine

import (
	"time"

	"github.com/rollbus/rollbus/bench/engine/model"
)

// KVEvent is a change of a rank's prefix cache, with all that the events of a
// real engine carry. Hashes are package blockhash's chain at BlockTokens.
type KVEvent struct {
	Kind        model.Kind // Stored, Removed or Cleared
	At          time.Duration
	Hashes      []uint64
	Parent      uint64 // of Hashes[0], if HasParent
	HasParent   bool
	Tokens      []uint32 // of all Hashes, Stored only
	BlockTokens int
	LoRA        string
	Salt        string
}

// kv collects one event; tellKV hands the events of one instant over together.
func (d *driver) kv(rank int, e model.Event) {
	if d.cfg.OnKV == nil {
		return
	}
	if n := len(d.batch); n > 0 && d.batch[n-1].At != e.At {
		d.tellKV(rank)
	}
	b := d.cfg.Engine.BlockTokens
	ev := KVEvent{Kind: e.Kind, At: e.At, BlockTokens: b, Hashes: append([]uint64(nil), e.Blocks...)}
	if e.Kind == model.Stored {
		j := d.jobs[e.ID]
		if j == nil {
			j = d.left[e.ID]
		}
		if j == nil {
			return
		}
		ev.Parent, ev.HasParent = e.Parent, e.First > 0
		ev.LoRA, ev.Salt = j.gen.LoRA, j.gen.Salt
		ev.Tokens = append([]uint32(nil), j.names.tokens[e.First*b:(e.First+len(e.Blocks))*b]...)
	}
	d.batch = append(d.batch, ev)
}

func (d *driver) tellKV(rank int) {
	if len(d.batch) > 0 {
		d.cfg.OnKV(rank, d.batch)
		d.batch = nil
	}
}
