package kvevents

import (
	"encoding/binary"
	"math"
)

// Encoder writes batches as engines do, for fakes, benchmarks and tests; the
// bytes are compared with captured ones. The zero value writes events as maps.
type Encoder struct {
	Arrays bool // events as arrays
	b      []byte
}

// Begin starts a batch of n events.
func (w *Encoder) Begin(ts float64, n int) {
	w.b = append(w.b[:0], 0x93, 0xcb)
	w.b = binary.BigEndian.AppendUint64(w.b, math.Float64bits(ts))
	w.array(n)
}

// End closes the batch with its rank, -1 for nil, and gives its bytes; they are
// valid until the next Begin.
func (w *Encoder) End(rank int) []byte {
	if rank < 0 {
		w.nil()
	} else {
		w.int(int64(rank))
	}
	return w.b
}

// Event writes one. A store of arrays has the eleven elements of vLLM's last
// array releases, cut after the last that says something but never before the
// medium; tiers other than gpu are CPU and STORAGE.
func (w *Encoder) Event(e *Event) {
	if w.Arrays {
		w.eventArray(e)
	} else {
		w.eventMap(e)
	}
}

var tags = map[Kind]string{Stored: "BlockStored", Removed: "BlockRemoved", Cleared: "AllBlocksCleared"}

var media = [tiers]string{"GPU", "CPU", "STORAGE", "EXTERNAL"}

func (w *Encoder) eventArray(e *Event) {
	switch e.Kind {
	case Stored:
		n := 6
		switch {
		case len(e.Spec) > 0:
			n = 11
		case e.Group >= 0:
			n = 9
		case len(e.Salt) > 0 || len(e.LoRA) > 0:
			n = 7
		}
		w.array(n + 1)
		w.str(tags[Stored])
		w.hashes(e.Hashes)
		w.parent(e)
		w.tokens(e)
		w.int(int64(e.BlockSize))
		w.loraID(e)
		w.str(media[e.Tier])
		if n >= 7 {
			switch {
			case len(e.Salt) > 0: // SGLang's map
				w.b = append(w.b, 0x81)
				w.str("cache_salt")
				w.str(string(e.Salt))
			case len(e.LoRA) > 0:
				w.str(string(e.LoRA))
			default:
				w.nil()
			}
		}
		if n >= 9 {
			w.nils(len(e.Hashes)) // extra keys
			w.int(int64(e.Group))
		}
		if n >= 11 {
			w.str(string(e.Spec))
			w.nil()
		}
	case Removed:
		n := 2
		if e.Group >= 0 {
			n = 3
		}
		w.array(n + 1)
		w.str(tags[Removed])
		w.hashes(e.Hashes)
		w.str(media[e.Tier])
		if n == 3 {
			w.int(int64(e.Group))
		}
	default:
		w.array(1)
		w.str(tags[Cleared])
	}
}

func (w *Encoder) eventMap(e *Event) {
	n := 1
	count := func(when bool) bool {
		if when {
			n++
		}
		return when
	}
	store := e.Kind == Stored
	if e.Kind != Cleared {
		n += 2 // hashes, medium
	}
	if store {
		n += 4 // parent, tokens, size, lora_id
	}
	lora, salt := count(store && len(e.LoRA) > 0), count(store && len(e.Salt) > 0)
	group, spec, session := count(e.Kind != Cleared && e.Group >= 0), count(store && len(e.Spec) > 0), count(store && len(e.Session) > 0)
	w.mapping(n)
	w.str("type")
	w.str(tags[e.Kind])
	if e.Kind == Cleared {
		return
	}
	w.str("block_hashes")
	w.hashes(e.Hashes)
	if store {
		w.str("parent_block_hash")
		w.parent(e)
		w.str("token_ids")
		w.tokens(e)
		w.str("block_size")
		w.int(int64(e.BlockSize))
		w.str("lora_id")
		w.loraID(e)
	}
	w.str("medium")
	w.str(media[e.Tier])
	if lora {
		w.str("lora_name")
		w.str(string(e.LoRA))
	}
	if salt {
		w.str("cache_salt")
		w.str(string(e.Salt))
	}
	if session {
		w.str("session_id")
		w.str(string(e.Session))
	}
	if group {
		w.str("group_idx")
		w.int(int64(e.Group))
	}
	if spec {
		w.str("kv_cache_spec_kind")
		w.str(string(e.Spec))
	}
}

func (w *Encoder) parent(e *Event) {
	if e.HasParent {
		w.uint(e.Parent)
	} else {
		w.nil()
	}
}

func (w *Encoder) loraID(e *Event) {
	if e.HasLoRAID {
		w.int(e.LoRAID)
	} else {
		w.nil()
	}
}

func (w *Encoder) hashes(h []uint64) {
	w.array(len(h))
	for _, v := range h {
		w.uint(v)
	}
}

func (w *Encoder) tokens(e *Event) {
	w.array(len(e.Tokens))
	for i, v := range e.Tokens {
		if e.Pairs() {
			w.array(2)
			w.uint(uint64(v))
			v = e.Second[i]
		}
		w.uint(uint64(v))
	}
}

func (w *Encoder) nils(n int) {
	w.array(n)
	for range n {
		w.nil()
	}
}

func (w *Encoder) nil() { w.b = append(w.b, 0xc0) }

func (w *Encoder) array(n int) {
	switch {
	case n < 16:
		w.b = append(w.b, 0x90|byte(n))
	case n <= math.MaxUint16:
		w.b = binary.BigEndian.AppendUint16(append(w.b, 0xdc), uint16(n))
	default:
		w.b = binary.BigEndian.AppendUint32(append(w.b, 0xdd), uint32(n))
	}
}

func (w *Encoder) mapping(n int) {
	if n < 16 {
		w.b = append(w.b, 0x80|byte(n))
		return
	}
	w.b = binary.BigEndian.AppendUint16(append(w.b, 0xde), uint16(n))
}

func (w *Encoder) str(s string) {
	switch n := len(s); {
	case n < 32:
		w.b = append(w.b, 0xa0|byte(n))
	case n <= math.MaxUint8:
		w.b = append(w.b, 0xd9, byte(n))
	default:
		s = s[:min(n, math.MaxUint16)]
		w.b = binary.BigEndian.AppendUint16(append(w.b, 0xda), uint16(len(s)))
	}
	w.b = append(w.b, s...)
}

func (w *Encoder) int(v int64) {
	switch {
	case v >= 0:
		w.uint(uint64(v))
	case v >= -32:
		w.b = append(w.b, byte(int8(v)))
	default:
		w.b = binary.BigEndian.AppendUint64(append(w.b, 0xd3), uint64(v))
	}
}

func (w *Encoder) uint(v uint64) {
	switch {
	case v < 128:
		w.b = append(w.b, byte(v))
	case v <= math.MaxUint8:
		w.b = append(w.b, 0xcc, byte(v))
	case v <= math.MaxUint16:
		w.b = binary.BigEndian.AppendUint16(append(w.b, 0xcd), uint16(v))
	case v <= math.MaxUint32:
		w.b = binary.BigEndian.AppendUint32(append(w.b, 0xce), uint32(v))
	default:
		w.b = binary.BigEndian.AppendUint64(append(w.b, 0xcf), v)
	}
}
