package subjects

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"

	"github.com/cespare/xxhash/v2"
	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/subjects/blockhash"
)

// Ownership is one entry of the owner map, owners/<key>: the engines that are
// proven to have the beginning of a prompt in their cache. It is written by
// compare and set alone; no entry and an entry without owners mean the same.
type Ownership struct {
	SchemaVersion int     `json:"schema_version"`
	Key           string  `json:"key"`
	Owners        []Owner `json:"owners"`
}

// Owner is one engine of an Ownership. It counts while the engine lives the same
// life (epoch) with the same weights.
type Owner struct {
	Engine        string `json:"engine"`
	Epoch         string `json:"epoch"`
	WeightVersion *int64 `json:"weight_version"`
	Anchor        uint64 `json:"anchor,string,omitempty"` // hash of the beginning's last block; 0 = nothing whose eviction would strike it off
	Proof         Proof  `json:"proof"`
}

// Proof is the clean completion, with usage, that made an engine an owner.
type Proof struct {
	Rollout      string `json:"rollout"`
	Bind         int    `json:"bind"`
	CachedTokens *int   `json:"cached_tokens"` // null = the engine does not tell
	At           int64  `json:"at"`            // server time, unix ns
}

// SeedState says what stands at _seed.<key>.
type SeedState string

// Seed states.
const (
	SeedLive     SeedState = "seed"     // the seeded reservation lives
	SeedCooldown SeedState = "cooldown" // proven a moment ago; its TTL ends it
)

// Seed is _seed.<key> in the reservations bucket, headers alone: the one
// permission to add an owner to a key, written in one batch with the
// reservation that it is for.
type Seed struct {
	Key           string    `json:"key"`
	State         SeedState `json:"state"`
	Engine        string    `json:"engine"`
	Job           string    `json:"job"`
	ID            string    `json:"id"`
	Bind          int       `json:"bind"`
	Epoch         string    `json:"epoch"`
	WeightVersion *int64    `json:"weight_version,omitempty"`
	Anchor        uint64    `json:"anchor,string,omitempty"`
	Dispatcher    string    `json:"dispatcher,omitempty"` // who seeded; for people
}

// Rollout is the seeded rollout's name, <job>.<id>.
func (s *Seed) Rollout() string { return RolloutKey(s.Job, s.ID) }

// Header is the seed as stored, but for the guard and the TTL.
func (s *Seed) Header() nats.Header {
	w := headers(8)
	w.set(HdrState, string(s.State))
	w.text(HdrEngine, s.Engine)
	w.text(HdrRollout, RolloutKey(s.Job, s.ID))
	w.num(HdrBind, int64(s.Bind))
	w.text(HdrEpoch, s.Epoch)
	w.ptr64(HdrWeightVersion, s.WeightVersion)
	w.hash(HdrAnchor, s.Anchor)
	w.text(HdrDispatcher, s.Dispatcher)
	return w.Header
}

// SeedFromHeader reads what stands at a seed's key.
func SeedFromHeader(key string, h nats.Header) (Seed, error) {
	r := headerReader{h: h}
	out := Seed{Key: key}
	v, _ := r.raw(HdrState)
	if out.State = SeedState(v); out.State != SeedLive && out.State != SeedCooldown {
		r.bad(HdrState, "%s is no state of a seed: want seed or cooldown", quote(v))
	}
	r.require(HdrEngine, HdrRollout, HdrBind)
	out.Engine = r.token(HdrEngine)
	name := r.text(HdrRollout)
	var ok bool
	if out.Job, out.ID, ok = SplitRolloutKey(name); !ok {
		r.bad(HdrRollout, "%s is no <job>.<id>", quote(name))
	}
	out.Bind = int(r.num(HdrBind, 0, MaxBind))
	out.Epoch = r.text(HdrEpoch)
	out.WeightVersion = r.ptr64(HdrWeightVersion)
	out.Anchor = r.hash(HdrAnchor)
	out.Dispatcher = r.text(HdrDispatcher)
	return out, r.err()
}

// OwnerKey names the beginning of a request's prompt in the owner map, and the
// block whose eviction ends an owner. Requests with an affinity have the hash of
// job, namespace and affinity; others that of their first anchor_tokens, or of
// the whole blocks there are. "" = it has none.
func OwnerKey(f *Facts, s Settings) (key string, anchor uint64) {
	s = s.WithDefaults()
	if len(f.Blocks) > 0 && (f.BlockTokens == 0 || f.BlockTokens == s.BlockTokens) {
		key = blockhash.AnchorKey(f.Blocks, s.AnchorTokens, s.BlockTokens)
		anchor = f.Blocks[min(len(f.Blocks), max(1, s.AnchorTokens/s.BlockTokens))-1]
	}
	if f.Affinity != "" {
		var d xxhash.Digest
		d.Reset()
		_, _ = d.WriteString(f.Job)
		_, _ = d.Write(binary.LittleEndian.AppendUint64([]byte{0}, f.Namespace))
		_, _ = d.WriteString(f.Affinity)
		key = fmt.Sprintf("%016x", d.Sum64())
	}
	return key, anchor
}

// CheckOwnerKey refuses what OwnerKey never gives.
func CheckOwnerKey(key string) error {
	if len(key) == 16 && strings.Trim(key, "0123456789abcdef") == "" {
		return nil
	}
	return fmt.Errorf("%w: owner key %s: want 16 hex digits, as in rollbus get owners", ErrBadName, quote(key))
}

// seedToken is the first token of a seed's key, where a reservation has its engine.
const seedToken = "_seed"

// SeedSubject is the subject of a key's seed, and its guard.
func (p Pool) SeedSubject(key string) string {
	return BucketSubject(p.Bucket(Reservations), seedToken+"."+key)
}

// ParseSeedSubject reads the owner key back from a seed's subject.
func (p Pool) ParseSeedSubject(subject string) (key string, ok bool) {
	key, ok = strings.CutPrefix(subject, p.SeedSubject(""))
	return key, ok && CheckOwnerKey(key) == nil
}

func (w *headerWriter) ptr64(name string, v *int64) {
	if v != nil {
		w.num(name, *v)
	}
}

func (r *headerReader) ptr64(name string) *int64 {
	if !r.has(name) {
		return nil
	}
	n := r.num(name, -1<<62, 1<<62)
	return &n
}

func (w *headerWriter) hash(name string, v uint64) {
	if v != 0 {
		w.set(name, fmt.Sprintf("%016x", v))
	}
}

// hash reads a 64-bit hash in hex; absent = 0.
func (r *headerReader) hash(name string) uint64 {
	v, ok := r.raw(name)
	if !ok {
		return 0
	}
	n, err := strconv.ParseUint(v, 16, 64)
	if err != nil {
		r.bad(name, "%s is no 64-bit hex number", quote(v))
	}
	return n
}

func (r *headerReader) ownerKey() string {
	v, ok := r.raw(HdrOwnerKey)
	if !ok {
		return ""
	}
	if err := CheckOwnerKey(v); err != nil {
		r.bad(HdrOwnerKey, "%v", err)
		return ""
	}
	return v
}
