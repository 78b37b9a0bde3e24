package kvevents

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/rollbus/rollbus/workeragent/kvevents/msgpack"
)

// ErrPayload is a batch of which nothing can be read.
var ErrPayload = errors.New("not a batch of KV events")

var errEvent = errors.New("broken event")

// Decode reads one payload into b, reusing its memory. Arrays and maps, of both
// engines and any release, may mix; unknown trailing elements and keys are
// passed over; a broken or unknown event costs only itself. An error means that
// not even the envelope can be read; events read before that point stay in b.
func (b *Batch) Decode(payload []byte) error {
	*b = Batch{Rank: -1, Events: b.Events[:0], hashes: b.hashes[:0], tokens: b.tokens[:0], second: b.second[:0],
		extras: b.extras[:0], texts: b.texts[:0]}
	r := msgpack.Reader{B: payload}
	switch r.Kind() {
	case msgpack.Array:
		n, err := r.Array()
		if err != nil || n < 2 {
			return fmt.Errorf("%w: envelope of %d elements", ErrPayload, n)
		}
		if b.TS, err = r.Float(); err != nil {
			return fmt.Errorf("%w: time: %w", ErrPayload, err)
		}
		if err := b.events(&r); err != nil {
			return err
		}
		if n > 2 {
			return b.rank(&r)
		}
		return nil
	case msgpack.Map:
		return b.envelopeMap(&r)
	}
	return fmt.Errorf("%w: neither an array nor a map", ErrPayload)
}

func (b *Batch) envelopeMap(r *msgpack.Reader) error {
	n, err := r.Map()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrPayload, err)
	}
	seen := false
	for range n {
		key, err := r.Str()
		if err != nil {
			return fmt.Errorf("%w: key: %w", ErrPayload, err)
		}
		switch string(key) {
		case "ts":
			b.TS, err = r.Float()
		case "events":
			seen = true
			err = b.events(r)
		case "data_parallel_rank", "attn_dp_rank":
			err = b.rank(r)
		default:
			err = r.Skip()
		}
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrPayload, key, err)
		}
	}
	if !seen {
		return fmt.Errorf("%w: no events in it", ErrPayload)
	}
	return nil
}

// maxRank bounds rank numbers; beyond it a number is taken for garbage.
const maxRank = 4096

func (b *Batch) rank(r *msgpack.Reader) error {
	if r.Nil() {
		return nil
	}
	v, err := r.Int64()
	if err != nil || v < 0 || v > maxRank {
		return fmt.Errorf("%w: rank %d: %w", ErrPayload, v, errors.Join(err))
	}
	b.Rank = int(v)
	return nil
}

func (b *Batch) events(r *msgpack.Reader) error {
	n, err := r.Array()
	if err != nil {
		return fmt.Errorf("%w: events: %w", ErrPayload, err)
	}
	for range n {
		at := r.I
		marks := [...]int{len(b.hashes), len(b.tokens), len(b.second), len(b.extras), len(b.texts)}
		e := Event{Group: -1}
		known, err := b.event(r, &e)
		if err == nil && known {
			b.Events = append(b.Events, e)
			continue
		}
		if known {
			b.Broken++
		} else {
			b.Unknown++
		}
		b.hashes, b.tokens, b.second = b.hashes[:marks[0]], b.tokens[:marks[1]], b.second[:marks[2]]
		b.extras, b.texts = b.extras[:marks[3]], b.texts[:marks[4]]
		r.I = at
		if err := r.Skip(); err != nil {
			return fmt.Errorf("%w: events end early: %w", ErrPayload, err)
		}
	}
	return nil
}

// event reads one event; known tells whether its type is one of ours.
func (b *Batch) event(r *msgpack.Reader, e *Event) (known bool, err error) {
	switch r.Kind() {
	case msgpack.Array:
		n, err := r.Array()
		if err != nil || n < 1 {
			return true, errEvent
		}
		tag, err := r.Str()
		if err != nil {
			return true, err
		}
		if e.Kind = kindOf(tag); e.Kind == 0 {
			return false, nil
		}
		return true, b.array(r, e, n-1)
	case msgpack.Map:
		return b.mapping(r, e)
	}
	return true, errEvent
}

func kindOf(tag []byte) Kind {
	switch string(tag) {
	case "BlockStored":
		return Stored
	case "BlockRemoved":
		return Removed
	case "AllBlocksCleared":
		return Cleared
	}
	return 0
}

// array reads the n elements after the tag.
func (b *Batch) array(r *msgpack.Reader, e *Event, n int) error {
	var err error
	for i := 1; i <= n && err == nil; i++ {
		switch {
		case e.Kind == Stored && i <= 11:
			err = b.storedElement(r, e, i)
		case e.Kind == Removed && i <= 3:
			switch i {
			case 1:
				err = b.readHashes(r, e)
			case 2:
				err = b.medium(r, e)
			case 3:
				err = group(r, e)
			}
		default:
			err = r.Skip()
		}
	}
	if err == nil && (e.Kind == Stored && n < 4 || e.Kind == Removed && n < 1) {
		err = errEvent
	}
	return err
}

func (b *Batch) storedElement(r *msgpack.Reader, e *Event, i int) error {
	switch i {
	case 1:
		return b.readHashes(r, e)
	case 2:
		return parent(r, e)
	case 3:
		return b.readTokens(r, e)
	case 4:
		return blockSize(r, e)
	case 5:
		return loraID(r, e)
	case 6:
		return b.medium(r, e)
	case 7: // vLLM: the LoRA's name; SGLang: a map of metadata; use it by type
		switch r.Kind() {
		case msgpack.Str:
			return text(r, &e.LoRA)
		case msgpack.Map:
			return metadata(r, e)
		}
		return r.Skip()
	case 8:
		if r.Kind() == msgpack.Array {
			return b.extraKeys(r, e)
		}
		return r.Skip()
	case 9:
		if r.Kind() == msgpack.Int {
			return group(r, e)
		}
		return r.Skip()
	case 10:
		if r.Kind() == msgpack.Str {
			return text(r, &e.Spec)
		}
		return r.Skip()
	}
	if r.Kind() == msgpack.Int {
		return window(r, e)
	}
	return r.Skip()
}

// mapping reads an event that is a map; its type may stand anywhere in it.
func (b *Batch) mapping(r *msgpack.Reader, e *Event) (known bool, err error) {
	n, err := r.Map()
	if err != nil {
		return true, err
	}
	hashes, tokens := false, false
	for range n {
		key, err := r.Str()
		if err != nil {
			return true, err
		}
		switch string(key) {
		case "type":
			tag, err := r.Str()
			if err != nil {
				return true, err
			}
			if e.Kind = kindOf(tag); e.Kind == 0 {
				return false, nil
			}
		case "block_hashes":
			hashes, err = true, b.readHashes(r, e)
		case "parent_block_hash":
			err = parent(r, e)
		case "token_ids":
			tokens, err = true, b.readTokens(r, e)
		case "block_size":
			err = blockSize(r, e)
		case "lora_id":
			err = loraID(r, e)
		case "medium":
			err = b.medium(r, e)
		case "lora_name":
			err = text(r, &e.LoRA)
		case "cache_salt":
			err = text(r, &e.Salt)
		case "extra_keys":
			if r.Kind() == msgpack.Array {
				err = b.extraKeys(r, e)
			} else {
				err = r.Skip()
			}
		case "group_idx":
			err = group(r, e)
		case "kv_cache_spec_kind":
			err = text(r, &e.Spec)
		case "kv_cache_spec_sliding_window":
			err = window(r, e)
		case "locality":
			err = text(r, &e.Locality)
		case "ownership":
			err = text(r, &e.Ownership)
		case "session_id":
			err = text(r, &e.Session)
		default:
			err = r.Skip()
		}
		if err != nil {
			return true, err
		}
	}
	if e.Kind == 0 || e.Kind != Cleared && !hashes || e.Kind == Stored && !tokens {
		return true, errEvent
	}
	if string(e.Locality) == "REMOTE" {
		e.Tier = Shared
	}
	return true, nil
}

// readHash reads one hash of any kind: an integer by its bits, a byte string
// by its last 8 bytes, big-endian.
func readHash(r *msgpack.Reader) (uint64, error) {
	if r.I < len(r.B) && r.B[r.I] == 0xcf && r.Left() >= 9 { // the usual one
		v := binary.BigEndian.Uint64(r.B[r.I+1:])
		r.I += 9
		return v, nil
	}
	switch r.Kind() {
	case msgpack.Int:
		return r.Bits()
	case msgpack.Bin:
		b, err := r.Bin()
		if err != nil {
			return 0, err
		}
		if len(b) < 8 {
			return 0, errEvent
		}
		return binary.BigEndian.Uint64(b[len(b)-8:]), nil
	}
	return 0, msgpack.ErrType
}

func (b *Batch) readHashes(r *msgpack.Reader, e *Event) error {
	n, err := r.Array()
	if err != nil {
		return err
	}
	at := len(b.hashes)
	for range n {
		h, err := readHash(r)
		if err != nil {
			return err
		}
		b.hashes = append(b.hashes, h)
	}
	e.Hashes = b.hashes[at:len(b.hashes):len(b.hashes)]
	return nil
}

// parent: nil is none, and so is 0, which one producer writes for it.
func parent(r *msgpack.Reader, e *Event) error {
	if r.Nil() {
		return nil
	}
	h, err := readHash(r)
	e.Parent, e.HasParent = h, h != 0
	return err
}

func (b *Batch) readTokens(r *msgpack.Reader, e *Event) error {
	n, err := r.Array()
	if err != nil {
		return err
	}
	at := len(b.tokens)
	if n > 0 && r.Kind() == msgpack.Array {
		return b.readPairs(r, e, n)
	}
	if b.tokens, err = r.AppendUint32s(b.tokens, n); err != nil {
		return err
	}
	e.Tokens = b.tokens[at:len(b.tokens):len(b.tokens)]
	return nil
}

func (b *Batch) readPairs(r *msgpack.Reader, e *Event, n int) error {
	at, second := len(b.tokens), len(b.second)
	for range n {
		two, err := r.Array()
		if err != nil || two != 2 {
			return errEvent
		}
		if b.tokens, err = r.AppendUint32s(b.tokens, 1); err != nil {
			return err
		}
		if b.second, err = r.AppendUint32s(b.second, 1); err != nil {
			return err
		}
	}
	e.Tokens, e.Second = b.tokens[at:len(b.tokens):len(b.tokens)], b.second[second:len(b.second):len(b.second)]
	return nil
}

// maxBlockSize bounds what is believed of a block size, tokens.
const maxBlockSize = 1 << 20

func blockSize(r *msgpack.Reader, e *Event) error {
	v, err := r.Int64()
	if err == nil && (v < 0 || v > maxBlockSize) {
		err = errEvent
	}
	e.BlockSize = int(v)
	return err
}

func loraID(r *msgpack.Reader, e *Event) (err error) {
	if r.Nil() {
		return nil
	}
	e.LoRAID, err = r.Int64()
	e.HasLoRAID = err == nil
	return err
}

func (b *Batch) medium(r *msgpack.Reader, e *Event) error {
	if r.Nil() {
		return nil
	}
	m, err := r.Str()
	e.Tier = tierOf(m)
	return err
}

func group(r *msgpack.Reader, e *Event) error {
	if r.Nil() {
		return nil
	}
	v, err := r.Int64()
	if err == nil && (v < 0 || v > maxRank) {
		err = errEvent
	}
	e.Group = int(v)
	return err
}

func window(r *msgpack.Reader, e *Event) (err error) {
	if r.Nil() {
		return nil
	}
	e.Window, err = r.Int64()
	return err
}

func text(r *msgpack.Reader, into *[]byte) (err error) {
	if r.Nil() {
		return nil
	}
	*into, err = r.Str()
	return err
}

// metadata reads SGLang's map in the place of vLLM's LoRA name.
func metadata(r *msgpack.Reader, e *Event) error {
	n, err := r.Map()
	for ; n > 0 && err == nil; n-- {
		var key []byte
		if key, err = r.Str(); err != nil {
			break
		}
		switch string(key) {
		case "cache_salt":
			err = text(r, &e.Salt)
		case "session_id":
			err = text(r, &e.Session)
		default:
			err = r.Skip()
		}
	}
	return err
}

func (b *Batch) extraKeys(r *msgpack.Reader, e *Event) error {
	n, err := r.Array()
	if err != nil {
		return err
	}
	at, told := len(b.extras), false
	for range n {
		var x ExtraKeys
		if !r.Nil() {
			if r.Kind() != msgpack.Array {
				x.Other = true
				err = r.Skip()
			} else {
				err = b.extraOf(r, &x)
			}
			if err != nil {
				return err
			}
			told = told || x.Other || len(x.Texts) > 0
		}
		b.extras = append(b.extras, x)
	}
	if !told { // all nil: as good as absent
		b.extras = b.extras[:at]
		return nil
	}
	e.Extra = b.extras[at:len(b.extras):len(b.extras)]
	return nil
}

func (b *Batch) extraOf(r *msgpack.Reader, x *ExtraKeys) error {
	n, err := r.Array()
	at := len(b.texts)
	for ; n > 0 && err == nil; n-- {
		if r.Kind() != msgpack.Str {
			x.Other = true
			err = r.Skip()
			continue
		}
		var s []byte
		s, err = r.Str()
		b.texts = append(b.texts, s)
	}
	x.Texts = b.texts[at:len(b.texts):len(b.texts)]
	return err
}
