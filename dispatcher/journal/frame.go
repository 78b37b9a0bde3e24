package journal

import (
	"encoding/binary"
	"encoding/json"
	"fmt"

	"github.com/cespare/xxhash/v2"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// Version of the frames. Fields may be added to headers within a version.
const Version = 1

// magic, a version byte, the header's length and the header, then the payload:
// zstd of the batch, or its part.
const magic = "RBJ"

// Begin is the first frame's, and each checkpoint's: all that a replay needs to know.
type Begin struct {
	Pool        string       `json:"pool,omitempty"`
	Program     string       `json:"program,omitempty"` // version of the program
	Core        int          `json:"core"`              // core.Version
	Codec       int          `json:"codec"`             // core.CodecVersion
	Started     int64        `json:"started"`           // the dispatcher's own clock, unix ns; for people only
	Timings     core.Timings `json:"timings"`
	MaxInHand   int          `json:"max_in_hand,omitempty"`
	MaxAnswered int          `json:"max_answered,omitempty"`
	MaxIndex    int64        `json:"max_index_bytes,omitempty"`
	Schema      Schema       `json:"schema"`
}

// Header of a frame.
type Header struct {
	Dispatcher string `json:"d"`
	Start      string `json:"s"` // random, of this start of the dispatcher
	Batch      uint64 `json:"b"` // from 0, the begin's; dropped ones count
	First      uint64 `json:"n"` // number of its first event, from 0
	Events     int    `json:"e,omitempty"`
	Now        int64  `json:"t,omitempty"` // ns since the core started, of the step before its first
	Reset      bool   `json:"r,omitempty"` // refers to no hash of an earlier batch
	Part       int    `json:"p,omitempty"` // from 0
	Parts      int    `json:"q,omitempty"` // 0 = 1
	Raw        int    `json:"l,omitempty"` // bytes of the batch unpacked
	Sum        uint64 `json:"x,omitempty"` // xxhash64 of the payload
	Lost       uint64 `json:"g,omitempty"` // gap record: events dropped since the start
	Checkpoint bool   `json:"k,omitempty"` // the payload is the core's state before event First; reading may start here
	Digest     uint64 `json:"y,omitempty"` // of a checkpoint: the chained digest of the effects until there
	State      uint64 `json:"z,omitempty"` // of a checkpoint: xxhash64 of the state unpacked
	Server     int64  `json:"u,omitempty"` // of a checkpoint: the NATS server's clock as the core knew it, unix ns
	Begin      *Begin `json:"begin,omitempty"`
	End        bool   `json:"end,omitempty"` // the dispatcher stopped in order; nothing follows
}

func (h *Header) parts() int { return max(1, h.Parts) }

func appendFrame(h *Header, payload []byte) ([]byte, error) {
	h.Sum = xxhash.Sum64(payload)
	j, err := json.Marshal(h)
	if err != nil {
		return nil, fmt.Errorf("journal frame: %w", err)
	}
	b := append(make([]byte, 0, len(magic)+4+len(j)+len(payload)), magic...)
	b = binary.AppendUvarint(append(b, Version), uint64(len(j)))
	return append(append(b, j...), payload...), nil
}

// ReadFrame takes a frame apart. The payload is checked and shares b's memory.
func ReadFrame(b []byte) (h *Header, payload []byte, err error) {
	if len(b) < len(magic)+1 || string(b[:len(magic)]) != magic {
		return nil, nil, ErrForeign
	}
	if v := b[len(magic)]; v != Version {
		return nil, nil, fmt.Errorf("%w: frame version %d, this program reads %d", ErrVersion, v, Version)
	}
	b = b[len(magic)+1:]
	n, k := binary.Uvarint(b)
	if k <= 0 || n > uint64(len(b)-k) {
		return nil, nil, fmt.Errorf("%w: a frame ends in its header", ErrCorrupt)
	}
	h = new(Header)
	if err := json.Unmarshal(b[k:k+int(n)], h); err != nil {
		return nil, nil, fmt.Errorf("%w: frame header: %w", ErrCorrupt, err)
	}
	payload = b[k+int(n):]
	if h.Dispatcher == "" || h.Events < 0 || h.Raw < 0 || h.Part < 0 || h.Part >= h.parts() {
		return nil, nil, fmt.Errorf("%w: a frame header without sense", ErrCorrupt)
	}
	if xxhash.Sum64(payload) != h.Sum {
		return h, nil, fmt.Errorf("%w: checksum of batch %d", ErrCorrupt, h.Batch)
	}
	return h, payload, nil
}
