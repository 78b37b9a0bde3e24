package kvevents

import (
	"bytes"
	"strings"
)

// Kind of an event.
type Kind uint8

// Kinds.
const (
	Stored Kind = iota + 1
	Removed
	Cleared
)

func (k Kind) String() string {
	switch k {
	case Stored:
		return "stored"
	case Removed:
		return "removed"
	case Cleared:
		return "cleared"
	}
	return "unknown"
}

// Tier is where a block lies.
type Tier uint8

// Tiers. Shared memory of a fleet is nobody's local hit.
const (
	GPU Tier = iota
	CPU
	SSD
	Shared
	tiers = iota
)

func (t Tier) String() string {
	switch t {
	case GPU:
		return "gpu"
	case CPU:
		return "cpu"
	case SSD:
		return "ssd"
	}
	return "shared"
}

// tierOf reads an engine's medium; what is unknown is nobody's hit.
func tierOf(medium []byte) Tier {
	switch {
	case len(medium) == 0 || bytes.EqualFold(medium, []byte("GPU")):
		return GPU
	case bytes.EqualFold(medium, []byte("CPU")), bytes.EqualFold(medium, []byte("CPU_PINNED")),
		len(medium) >= 8 && bytes.EqualFold(medium[:8], []byte("CPU_TIER")):
		return CPU
	case bytes.EqualFold(medium, []byte("STORAGE")), bytes.EqualFold(medium, []byte("DISK")), bytes.EqualFold(medium, []byte("FS")):
		return SSD
	}
	return Shared
}

// Event is one event of a batch. Its slices belong to the Batch and the payload
// it was decoded from; they are valid until the next Decode into that batch.
type Event struct {
	Kind      Kind
	Tier      Tier
	Hashes    []uint64 // the engine's: 64 bits of whatever it sent
	Parent    uint64
	HasParent bool
	BlockSize int      // tokens a block; 0 = a location-only store
	Tokens    []uint32 // BlockSize x len(Hashes) of them; of pairs, the first elements
	Second    []uint32 // second elements of pairs, nil when tokens are plain (EAGLE)
	LoRA      []byte
	LoRAID    int64
	HasLoRAID bool
	Salt      []byte
	Group     int // KV cache group, -1 = none
	Spec      []byte
	Window    int64 // sliding window, tokens; 0 = none
	Extra     []ExtraKeys
	Locality  []byte
	Ownership []byte
	Session   []byte
}

// ExtraKeys are what an engine mixed into one block's hash beside the tokens.
type ExtraKeys struct {
	Texts [][]byte
	Other bool // something that is no string: an image, say
}

// Pairs tells whether the tokens came as pairs [t, next].
func (e *Event) Pairs() bool { return e.Second != nil }

// Lookahead is the token that has to follow the last block for a hit on it. The
// index does not use it: a pool block's hash ends before that token, so where a
// prompt leaves a chain of pairs the view promises up to one engine block too
// much there. Two blocks that differ only in it are one pool block, held twice.
func (e *Event) Lookahead() (uint32, bool) {
	if len(e.Second) == 0 {
		return 0, false
	}
	return e.Second[len(e.Second)-1], true
}

// attention tells whether the event is of a cache group that an index of
// prefixes may use: full attention, or a release that has no groups.
func (e *Event) attention() bool {
	if e.Window > 0 {
		return false
	}
	if len(e.Spec) > 0 {
		s := string(e.Spec)
		return s == "full_attention" || strings.Contains(s, "mla") && !strings.Contains(s, "sliding")
	}
	return e.Group <= 0
}

// Batch is one decoded message.
type Batch struct {
	TS      float64
	Rank    int // -1 = not told
	Events  []Event
	Unknown int // events of a type that is not known here
	Broken  int // events of a known type that do not decode

	hashes []uint64
	tokens []uint32
	second []uint32
	extras []ExtraKeys
	texts  [][]byte
}

// Skipped counts the events that could not be used.
func (b *Batch) Skipped() int { return b.Unknown + b.Broken }

// Clears tells whether some event empties the cache.
func (b *Batch) Clears() bool {
	for i := range b.Events {
		if b.Events[i].Kind == Cleared {
			return true
		}
	}
	return false
}
