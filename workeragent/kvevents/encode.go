package kvevents

import (
	"encoding/binary"
	"math"
)

// Dialect is how a release spells its events. The bytes of each are compared
// with recorded ones.
type Dialect uint8

// Dialects.
const (
	VLLMMaps     Dialect = iota // v0.24 and later
	VLLMArrays                  // v0.22, v0.23: eleven fields
	VLLMMedium                  // v0.11: arrays up to the medium
	VLLMFirst                   // v0.9: arrays without a medium
	SGLangMaps                  // since #37482
	SGLangArrays                // before: signed hashes, a map for the salt
)

func (d Dialect) String() string {
	return [...]string{"vllm-maps", "vllm-arrays", "vllm-medium", "vllm-first", "sglang-maps", "sglang-arrays"}[d]
}

// Encoder writes batches as engines do, for fakes, benchmarks and tests. Tiers
// other than gpu are vLLM's CPU and STORAGE, SGLang's CPU_PINNED and DISK.
type Encoder struct {
	Dialect Dialect
	b       []byte
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

// Event writes one.
func (w *Encoder) Event(e *Event) {
	switch w.Dialect {
	case VLLMMaps, SGLangMaps:
		w.eventMap(e)
	default:
		w.eventArray(e)
	}
}

var tags = map[Kind]string{Stored: "BlockStored", Removed: "BlockRemoved", Cleared: "AllBlocksCleared"}

func (w *Encoder) sglang() bool { return w.Dialect == SGLangMaps || w.Dialect == SGLangArrays }

func (w *Encoder) medium(t Tier) {
	media := [tiers]string{"GPU", "CPU", "STORAGE", "EXTERNAL"}
	if w.sglang() {
		media = [tiers]string{"GPU", "CPU_PINNED", "DISK", "EXTERNAL"}
	}
	w.str(media[t])
}

func (w *Encoder) eventArray(e *Event) {
	switch e.Kind {
	case Stored:
		n := map[Dialect]int{VLLMArrays: 11, VLLMMedium: 6, VLLMFirst: 5, SGLangArrays: 6}[w.Dialect]
		if w.Dialect == SGLangArrays && len(e.Salt) > 0 {
			n = 7
		}
		w.array(n + 1)
		w.str(tags[Stored])
		w.hashes(e.Hashes)
		w.parent(e)
		w.tokens(e)
		w.int(int64(e.BlockSize))
		w.loraID(e)
		if n >= 6 {
			w.medium(e.Tier)
		}
		switch {
		case n == 7:
			w.mapping(1)
			w.str("cache_salt")
			w.str(string(e.Salt))
		case n == 11:
			w.text(e.LoRA)
			w.extraKeys(e)
			w.int(int64(max(0, e.Group)))
			w.text(e.Spec)
			w.nil()
		}
	case Removed:
		switch w.Dialect {
		case VLLMFirst:
			w.array(2)
		case VLLMArrays:
			w.array(4)
		default:
			w.array(3)
		}
		w.str(tags[Removed])
		w.hashes(e.Hashes)
		if w.Dialect != VLLMFirst {
			w.medium(e.Tier)
		}
		if w.Dialect == VLLMArrays {
			w.int(int64(max(0, e.Group)))
		}
	default:
		w.array(1)
		w.str(tags[Cleared])
	}
}

func (w *Encoder) eventMap(e *Event) {
	vllm, store := w.Dialect == VLLMMaps, e.Kind == Stored
	n := 1
	if e.Kind != Cleared {
		n += 2 // hashes, medium
	}
	if store {
		n += 4 // parent, tokens, size, lora_id
	}
	if vllm && e.Kind != Cleared {
		n++ // group
	}
	if vllm && store {
		n += 3 // lora_name, extra_keys, kind
	}
	salt, session := !vllm && store && len(e.Salt) > 0, !vllm && store && len(e.Session) > 0
	if salt {
		n++
	}
	if session {
		n++
	}
	w.mapping(n)
	w.key("type", func() { w.str(tags[e.Kind]) })
	if e.Kind == Cleared {
		return
	}
	w.key("block_hashes", func() { w.hashes(e.Hashes) })
	if store {
		w.key("parent_block_hash", func() { w.parent(e) })
		w.key("token_ids", func() { w.tokens(e) })
		w.key("block_size", func() { w.int(int64(e.BlockSize)) })
		w.key("lora_id", func() { w.loraID(e) })
	}
	w.key("medium", func() { w.medium(e.Tier) })
	if vllm && store {
		w.key("lora_name", func() { w.text(e.LoRA) })
		w.key("extra_keys", func() { w.extraKeys(e) })
	}
	if vllm {
		w.key("group_idx", func() { w.int(int64(max(0, e.Group))) })
	}
	if vllm && store {
		w.key("kv_cache_spec_kind", func() { w.text(e.Spec) })
	}
	if salt {
		w.key("cache_salt", func() { w.text(e.Salt) })
	}
	if session {
		w.key("session_id", func() { w.text(e.Session) })
	}
}

func (w *Encoder) key(name string, value func()) {
	w.str(name)
	value()
}

// text writes a string, nil for none.
func (w *Encoder) text(s []byte) {
	if s == nil {
		w.nil()
	} else {
		w.str(string(s))
	}
}

// extraKeys writes what is in the blocks' hashes: as vLLM does it, the LoRA in
// every block, the salt in a prompt's first.
func (w *Encoder) extraKeys(e *Event) {
	w.array(len(e.Hashes))
	for i := range e.Hashes {
		var keys [][]byte
		if len(e.LoRA) > 0 {
			keys = append(keys, e.LoRA)
		}
		if len(e.Salt) > 0 && i == 0 && !e.HasParent {
			keys = append(keys, e.Salt)
		}
		if len(keys) == 0 {
			w.nil()
			continue
		}
		w.array(len(keys))
		for _, k := range keys {
			w.str(string(k))
		}
	}
}

func (w *Encoder) parent(e *Event) {
	if e.HasParent {
		w.hash(e.Parent)
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
		w.hash(v)
	}
}

// hash is signed in SGLang's events, unsigned in vLLM's.
func (w *Encoder) hash(h uint64) {
	if w.Dialect == SGLangArrays {
		w.int(int64(h))
	} else {
		w.uint(h)
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
