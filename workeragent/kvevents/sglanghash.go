package kvevents

import (
	"crypto/sha256"
	"encoding/binary"
)

// SGLangPage is SGLang's hash of one page of its radix cache: the chain goes
// over the 32 bytes, events carry the first 8.
type SGLangPage [sha256.Size]byte

// Event is the hash as events carry it: 64 bits, which SGLang writes signed.
func (p SGLangPage) Event() uint64 { return binary.BigEndian.Uint64(p[:8]) }

// SGLangRoot is what the chain of a salted prompt starts from; without a salt
// it starts from nothing.
func SGLangRoot(salt string) *SGLangPage {
	if salt == "" {
		return nil
	}
	p := SGLangPage(sha256.Sum256([]byte("sglang-cache-salt-v1\x00" + salt)))
	return &p
}

// SGLangHash hashes one page behind another one, nil = the first. words are the
// page's tokens, of pairs both elements. It checks and fakes SGLang's events;
// mapping never needs it.
func SGLangHash(before *SGLangPage, words []uint32) SGLangPage {
	b := make([]byte, 0, sha256.Size+4*len(words))
	if before != nil {
		b = append(b, before[:]...)
	}
	for _, w := range words {
		b = binary.LittleEndian.AppendUint32(b, w)
	}
	return sha256.Sum256(b)
}
