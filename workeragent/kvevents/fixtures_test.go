package kvevents

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type payloadCase struct {
	Name   string `json:"name"`
	Engine string `json:"engine"`
	Hex    string `json:"hex"`
	Expect struct {
		TS      float64          `json:"ts"`
		Rank    *int             `json:"dp_rank"`
		Events  []map[string]any `json:"events"`
		Skipped int              `json:"skipped"`
	} `json:"expect"`
}

func load[T any](t testing.TB, path string) T {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var v T
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(path, err)
	}
	return v
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func payloads(t testing.TB) []payloadCase {
	return load[[]payloadCase](t, filepath.Join("testdata", "payloads.json"))
}

// scenario C6: arrays and maps, of both engines, read alike.
func TestEveryPayloadReadsAsExpected(t *testing.T) { checkPayloads(t, "testdata") }

func checkPayloads(t *testing.T, dir string) {
	t.Helper()
	cases := load[[]payloadCase](t, filepath.Join(dir, "payloads.json"))
	if len(cases) == 0 {
		t.Fatal("no cases")
	}
	var b Batch // one for all: nothing of one case may leak into the next
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			if err := b.Decode(unhex(t, c.Hex)); err != nil {
				t.Fatal(err)
			}
			if b.TS != c.Expect.TS || b.Skipped() != c.Expect.Skipped {
				t.Errorf("time %v skipped %d, want %v and %d", b.TS, b.Skipped(), c.Expect.TS, c.Expect.Skipped)
			}
			want := -1
			if c.Expect.Rank != nil {
				want = *c.Expect.Rank
			}
			if b.Rank != want {
				t.Errorf("rank %d, want %d", b.Rank, want)
			}
			got := make([]map[string]any, len(b.Events))
			for i := range b.Events {
				got[i] = normal(&b.Events[i])
			}
			if d := cmp.Diff(c.Expect.Events, got); d != "" {
				t.Errorf("events (-want +got):\n%s", d)
			}
		})
	}
}

// normal is an event in the form of the fixtures.
func normal(e *Event) map[string]any {
	m := map[string]any{"type": e.Kind.String()}
	if e.Kind == Cleared {
		return m
	}
	m["hashes"], m["tier"] = decimals(e.Hashes), e.Tier.String()
	if e.Group >= 0 {
		m["group_idx"] = float64(e.Group)
	}
	if e.Kind == Removed {
		return m
	}
	m["parent"] = nil
	if e.HasParent {
		m["parent"] = strconv.FormatUint(e.Parent, 10)
	}
	m["block_size"], m["token_ids"] = float64(e.BlockSize), numbers(e.Tokens)
	if e.Pairs() {
		pairs := make([]any, len(e.Tokens))
		for i := range e.Tokens {
			pairs[i] = []any{float64(e.Tokens[i]), float64(e.Second[i])}
		}
		next, _ := e.Lookahead()
		m["token_pairs"], m["lookahead_token"] = pairs, float64(next)
	}
	if e.HasLoRAID {
		m["lora_id"] = float64(e.LoRAID)
	}
	if e.Window != 0 {
		m["kv_cache_spec_sliding_window"] = float64(e.Window)
	}
	for key, v := range map[string][]byte{"lora_name": e.LoRA, "cache_salt": e.Salt, "kv_cache_spec_kind": e.Spec, "locality": e.Locality,
		"ownership": e.Ownership, "session_id": e.Session} {
		if v != nil {
			m[key] = string(v)
		}
	}
	if e.Extra != nil {
		extra := make([]any, len(e.Extra))
		for i, x := range e.Extra {
			texts := make([]any, len(x.Texts))
			for j, s := range x.Texts {
				texts[j] = string(s)
			}
			extra[i] = texts
		}
		m["extra_keys"] = extra
	}
	return m
}

func decimals(hashes []uint64) []any {
	out := make([]any, len(hashes))
	for i, h := range hashes {
		out[i] = strconv.FormatUint(h, 10)
	}
	return out
}

func numbers(tokens []uint32) []any {
	out := make([]any, len(tokens))
	for i, n := range tokens {
		out[i] = float64(n)
	}
	return out
}

type frameCase struct {
	Name   string   `json:"name"`
	Socket string   `json:"socket"`
	Frames []string `json:"frames_hex"`
	Expect struct {
		Kind    string  `json:"kind"`
		Topic   string  `json:"topic"`
		Seq     uint64  `json:"seq"`
		Epoch   string  `json:"epoch"`
		Start   *uint64 `json:"start_seq"`
		Payload string  `json:"payload"`
	} `json:"expect"`
}

func TestEveryFrameReadsAsExpected(t *testing.T) { checkFrames(t, "testdata") }

func checkFrames(t *testing.T, dir string) {
	t.Helper()
	byName := map[string]string{}
	for _, p := range load[[]payloadCase](t, filepath.Join(dir, "payloads.json")) {
		byName[p.Name] = p.Hex
	}
	for _, c := range load[[]frameCase](t, filepath.Join(dir, "frames.json")) {
		t.Run(c.Name, func(t *testing.T) {
			var frames [][]byte
			for _, f := range c.Frames {
				frames = append(frames, unhex(t, f))
			}
			if c.Expect.Kind == "request" {
				if d := cmp.Diff(frames, ReplayRequest(*c.Expect.Start)); d != "" {
					t.Errorf("request (-want +got):\n%s", d)
				}
				return
			}
			parse := ParseLive
			if c.Socket == "DEALER" {
				parse = ParseReplay
			}
			m, err := parse(frames)
			switch c.Expect.Kind {
			case "malformed":
				if err == nil {
					t.Errorf("accepted as %+v", m)
				}
			case "end":
				if err != nil || !m.End {
					t.Errorf("got %+v, %v", m, err)
				}
			case "batch":
				want := Message{Topic: c.Expect.Topic, Epoch: c.Expect.Epoch, Seq: c.Expect.Seq, Payload: unhex(t, byName[c.Expect.Payload])}
				if d := cmp.Diff(want, m); d != "" || err != nil {
					t.Errorf("%v (-want +got):\n%s", err, d)
				}
			default:
				t.Fatalf("kind %q", c.Expect.Kind)
			}
		})
	}
}

// scenario C10
func TestABrokenEventCostsOnlyItself(t *testing.T) {
	good := unhex(t, "93ac426c6f636b52656d6f76656491cfdeadbeef12345678a3475055")
	for name, bad := range map[string][]byte{
		"a hash that is a float": unhex(t, "92ac426c6f636b52656d6f76656491cb3ff0000000000000"),
		"no tag":                 unhex(t, "9101"),
		"empty":                  unhex(t, "90"),
		"no hashes":              unhex(t, "91ac426c6f636b52656d6f766564"),
		"a token below zero":     append(unhex(t, "96ab426c6f636b53746f72656491cfdeadbeef12345678c094ff020304"), unhex(t, "04c0")...),
		"not a container":        unhex(t, "07"),
		"a map without a type":   unhex(t, "81ac626c6f636b5f6861736865739101"),
	} {
		payload := append([]byte{0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x93}, good...)
		payload = append(append(append(payload, bad...), good...), 0x00)
		var b Batch
		if err := b.Decode(payload); err != nil || len(b.Events) != 2 || b.Broken != 1 || b.Rank != 0 {
			t.Errorf("%s: %v, %d events, %d broken, rank %d", name, err, len(b.Events), b.Broken, b.Rank)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, c := range payloads(f) {
		f.Add(unhex(f, c.Hex))
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		var b Batch
		_ = b.Decode(p)
		n := 0
		for i := range b.Events {
			e := &b.Events[i]
			n += len(e.Tokens) + len(e.Hashes)
			if e.Second != nil && len(e.Second) != len(e.Tokens) {
				t.Fatal("half of a pair")
			}
		}
		if n > len(p) {
			t.Fatalf("%d numbers from %d bytes", n, len(p))
		}
	})
}

func TestSGLangsHashMatchesItsVectors(t *testing.T) { checkVectors(t, "testdata") }

func checkVectors(t *testing.T, dir string) {
	t.Helper()
	type page struct {
		Words json.RawMessage `json:"words"` // numbers, or pairs of them
		SHA   string          `json:"sha256"`
		ID    string          `json:"event_id_u64"`
	}
	cases := load[[]struct {
		Name  string  `json:"name"`
		Salt  *string `json:"cache_salt"`
		Pages []page  `json:"pages"`
	}](t, filepath.Join(dir, "sglang_hash_vectors.json"))
	if len(cases) == 0 {
		t.Fatal("no vectors")
	}
	for _, c := range cases {
		var before *SGLangPage
		if c.Salt != nil {
			before = SGLangRoot(*c.Salt)
		}
		for i, p := range c.Pages {
			var words []uint32
			if json.Unmarshal(p.Words, &words) != nil {
				var pairs [][]uint32
				if err := json.Unmarshal(p.Words, &pairs); err != nil {
					t.Fatal(err)
				}
				words = slices.Concat(pairs...)
			}
			got := SGLangHash(before, words)
			if hex.EncodeToString(got[:]) != p.SHA || strconv.FormatUint(got.Event(), 10) != p.ID {
				t.Errorf("%s page %d: %x", c.Name, i, got)
			}
			before = &got
		}
	}
}
