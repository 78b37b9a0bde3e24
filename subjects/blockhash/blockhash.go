// Package blockhash is the chained hash that names the blocks of a prompt:
// equal names mean equal tokens from the beginning on, in one namespace.
//
//	block(i) = xxhash64(block(i-1) as 8 bytes LE || tokens of block i as u32 LE)
//	block(-1) = Namespace = xxhash64("model\0lora\0salt")
//
// Clients, agents and the index of a dispatcher share it; the golden vectors in
// testdata are the contract with other languages. Nothing here blocks, keeps
// state outside a Hasher, or fails.
package blockhash

import (
	"encoding/binary"
	"strconv"

	"github.com/cespare/xxhash/v2"
)

// Namespace is the parent of a prompt's first block: the same tokens under
// another model, LoRA or salt share nothing (scenario C7).
func Namespace(model, lora, salt string) uint64 {
	var d xxhash.Digest
	d.Reset()
	_, _ = d.WriteString(model)
	_, _ = d.Write(zero)
	_, _ = d.WriteString(lora)
	_, _ = d.Write(zero)
	_, _ = d.WriteString(salt)
	return d.Sum64()
}

var zero = []byte{0}

// stackTokens is the largest block that is hashed without allocating, tokens.
const stackTokens = 256

// Block hashes one block of tokens under its parent.
func Block(parent uint64, tokens []uint32) uint64 {
	if len(tokens) > stackTokens {
		return large(parent, tokens)
	}
	var buf [8 + 4*stackTokens]byte
	binary.LittleEndian.PutUint64(buf[:8], parent)
	for i, t := range tokens {
		binary.LittleEndian.PutUint32(buf[8+4*i:], t)
	}
	return xxhash.Sum64(buf[:8+4*len(tokens)])
}

func large(parent uint64, tokens []uint32) uint64 {
	var d xxhash.Digest
	d.Reset()
	var buf [4 * stackTokens]byte
	binary.LittleEndian.PutUint64(buf[:8], parent)
	_, _ = d.Write(buf[:8])
	for len(tokens) > 0 {
		n := min(len(tokens), stackTokens)
		for i, t := range tokens[:n] {
			binary.LittleEndian.PutUint32(buf[4*i:], t)
		}
		_, _ = d.Write(buf[:4*n])
		tokens = tokens[n:]
	}
	return d.Sum64()
}

// Chain appends to dst the hashes of the whole blocks of tokens, first block
// first; what is left over has no hash. It does not allocate when dst has room.
// blockTokens below 1 gives nothing.
func Chain(dst []uint64, ns uint64, tokens []uint32, blockTokens int) []uint64 {
	if blockTokens < 1 {
		return dst
	}
	parent := ns
	for len(tokens) >= blockTokens {
		parent = Block(parent, tokens[:blockTokens])
		dst = append(dst, parent)
		tokens = tokens[blockTokens:]
	}
	return dst
}

// Hasher hashes tokens as they come. Make it with New; not safe for concurrent use.
type Hasher struct {
	parent uint64
	block  int
	part   []uint32 // tokens of the unfinished block
	tokens int
}

// New starts a chain in a namespace. blockTokens below 1 is taken as 1.
func New(ns uint64, blockTokens int) *Hasher {
	return &Hasher{parent: ns, block: max(1, blockTokens)}
}

// Append takes more tokens and appends to dst the hashes of the blocks that
// they complete.
func (h *Hasher) Append(dst []uint64, tokens []uint32) []uint64 {
	h.tokens += len(tokens)
	if len(h.part) > 0 {
		n := min(len(tokens), h.block-len(h.part))
		h.part = append(h.part, tokens[:n]...)
		tokens = tokens[n:]
		if len(h.part) < h.block {
			return dst
		}
		h.parent = Block(h.parent, h.part)
		dst = append(dst, h.parent)
		h.part = h.part[:0]
	}
	at := len(dst)
	dst = Chain(dst, h.parent, tokens, h.block)
	if len(dst) > at {
		h.parent = dst[len(dst)-1]
	}
	h.part = append(h.part, tokens[len(tokens)-len(tokens)%h.block:]...)
	return dst
}

// Tokens is how many were taken.
func (h *Hasher) Tokens() int { return h.tokens }

// Last is the hash of the last whole block, the namespace before there is one.
func (h *Hasher) Last() uint64 { return h.parent }

// AnchorKey names the beginning of a prompt, for owners and stickiness: the
// hash of its first anchorTokens, of the whole blocks there are when it is
// shorter, "" under one block. It may stand in a subject.
func AnchorKey(blocks []uint64, anchorTokens, blockTokens int) string {
	if len(blocks) == 0 || blockTokens < 1 {
		return ""
	}
	n := min(len(blocks), max(1, anchorTokens/blockTokens))
	const digits = 16
	s := strconv.FormatUint(blocks[n-1], 16)
	if len(s) == digits {
		return s
	}
	return "0000000000000000"[:digits-len(s)] + s
}
