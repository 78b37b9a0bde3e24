package kvevents

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// A cache event on the wire, little-endian (wire.md, `cache`):
//
//	byte  0      version, 1
//	byte  1      op: 1 stored, 2 removed, 3 cleared; 0x11: stored, with a parent
//	byte  2      tier: 0 gpu, 1 cpu, 2 ssd
//	byte  3      length n of the epoch
//	4..12        sequence
//	12..20       namespace hash
//	20..20+n     epoch
//	8 bytes      with a parent: the block before the first one below; the namespace hash when that begins a prompt
//	then         8-byte block hashes, to the end; of a stored chain the parents first
//
// A part of a snapshot:
//
//	byte  0      version, 1
//	byte  1      0x81, 0x80 + bit 0: the last part
//	byte  2      tier
//	byte  3      length n of the epoch
//	4..12        as of this sequence
//	12..16       part number, from 0
//	16..20       0
//	20..20+n     epoch
//	then         8-byte block hashes, to the end
const (
	wireVersion = 1
	wireHead    = 20
	snapshotOp  = 0x80
	lastPart    = 0x01
	parentFlag  = 0x10
)

// ErrWire is a cache event or snapshot part that cannot be read.
var ErrWire = errors.New("malformed cache event")

// Change is one cache event as published.
type Change struct {
	Epoch     string
	Seq       uint64
	Namespace uint64
	Kind      Kind
	Tier      Tier
	Blocks    []uint64
	// Parent of the first stored block, equal to Namespace when that begins a
	// prompt: a block that whoever follows must hold in the GPU tier, or it has
	// lost something. HasParent is false when the parent is not in the view, and
	// from agents that do not tell.
	Parent    uint64
	HasParent bool
}

// AppendChange encodes c behind dst.
func AppendChange(dst []byte, c *Change) []byte {
	op := byte(c.Kind)
	if c.HasParent {
		op |= parentFlag
	}
	dst = appendHead(dst, op, c.Tier, c.Epoch, c.Seq, c.Namespace)
	if c.HasParent {
		dst = binary.LittleEndian.AppendUint64(dst, c.Parent)
	}
	for _, b := range c.Blocks {
		dst = binary.LittleEndian.AppendUint64(dst, b)
	}
	return dst
}

func appendHead(dst []byte, op byte, tier Tier, epoch string, seq, ns uint64) []byte {
	epoch = epoch[:min(len(epoch), 255)]
	dst = append(dst, wireVersion, op, byte(tier), byte(len(epoch)))
	dst = binary.LittleEndian.AppendUint64(dst, seq)
	dst = binary.LittleEndian.AppendUint64(dst, ns)
	return append(dst, epoch...)
}

// DecodeChange reads one cache event. Blocks are appended to blocks[:0].
func DecodeChange(b []byte, blocks []uint64) (Change, error) {
	body, epoch, err := head(b)
	if err != nil {
		return Change{}, err
	}
	c := Change{Epoch: epoch, Kind: Kind(b[1] &^ parentFlag), HasParent: b[1]&parentFlag != 0, Tier: Tier(b[2]), Seq: binary.LittleEndian.Uint64(b[4:]), Namespace: binary.LittleEndian.Uint64(b[12:])}
	if c.Kind < Stored || c.Kind > Cleared || c.HasParent && (c.Kind != Stored || len(body) < 8) {
		return Change{}, fmt.Errorf("%w: op %#x, %d bytes of blocks", ErrWire, b[1], len(body))
	}
	if c.HasParent {
		c.Parent, body = binary.LittleEndian.Uint64(body), body[8:]
	}
	c.Blocks = readBlocks(body, blocks)
	return c, nil
}

func head(b []byte) (body []byte, epoch string, err error) {
	if len(b) < wireHead || len(b) < wireHead+int(b[3]) {
		return nil, "", fmt.Errorf("%w: %d bytes", ErrWire, len(b))
	}
	if b[0] != wireVersion {
		return nil, "", fmt.Errorf("%w: version %d, want %d; a newer agent? update this process", ErrWire, b[0], wireVersion)
	}
	if Tier(b[2]) > SSD {
		return nil, "", fmt.Errorf("%w: tier %d", ErrWire, b[2])
	}
	body = b[wireHead+int(b[3]):]
	if len(body)%8 != 0 {
		return nil, "", fmt.Errorf("%w: %d bytes of block hashes", ErrWire, len(body))
	}
	return body, string(b[wireHead : wireHead+int(b[3])]), nil
}

func readBlocks(body []byte, into []uint64) []uint64 {
	into = into[:0]
	for ; len(body) >= 8; body = body[8:] {
		into = append(into, binary.LittleEndian.Uint64(body))
	}
	return into
}

// Part is a part of a snapshot: blocks of one tier, as of a sequence.
type Part struct {
	Epoch  string
	AsOf   uint64
	Number uint32
	Last   bool
	Tier   Tier
	Blocks []uint64
}

// AppendPart encodes p behind dst.
func AppendPart(dst []byte, p *Part) []byte {
	op := byte(snapshotOp)
	if p.Last {
		op |= lastPart
	}
	dst = appendHead(dst, op, p.Tier, p.Epoch, p.AsOf, uint64(p.Number))
	for _, b := range p.Blocks {
		dst = binary.LittleEndian.AppendUint64(dst, b)
	}
	return dst
}

// DecodePart reads a part of a snapshot. Blocks are appended to blocks[:0].
func DecodePart(b []byte, blocks []uint64) (Part, error) {
	body, epoch, err := head(b)
	if err != nil {
		return Part{}, err
	}
	if b[1]&^lastPart != snapshotOp {
		return Part{}, fmt.Errorf("%w: op %d is no part of a snapshot", ErrWire, b[1])
	}
	return Part{Epoch: epoch, AsOf: binary.LittleEndian.Uint64(b[4:]), Number: binary.LittleEndian.Uint32(b[12:]), Last: b[1]&lastPart != 0,
		Tier: Tier(b[2]), Blocks: readBlocks(body, blocks)}, nil
}
