package kvevents

import (
	"encoding/hex"
	"testing"
)

// TestTheEncoderWritesTheRecordedBytes decodes each recorded batch of a dialect
// and writes it anew: fakes say exactly what engines say.
func TestTheEncoderWritesTheRecordedBytes(t *testing.T) {
	want := map[string]Dialect{
		"vllm_v0.9.2_dp_rank": VLLMFirst, "vllm_v0.11_medium": VLLMMedium, "vllm_v0.23_last_array_release": VLLMArrays,
		"vllm_v0.24_map_events": VLLMMaps, "vllm_lora_and_salt": VLLMMaps, "sglang_positional": SGLangArrays,
		"sglang_positional_metadata_map": SGLangArrays, "sglang_eagle_pairs": SGLangArrays, "sglang_tagged_maps": SGLangMaps,
		"llmd_sim_sleep_cleared": VLLMMedium,
	}
	for _, c := range payloads(t) {
		dialect, ok := want[c.Name]
		if !ok {
			continue
		}
		delete(want, c.Name)
		var b Batch
		if err := b.Decode(unhex(t, c.Hex)); err != nil {
			t.Fatal(err)
		}
		w := Encoder{Dialect: dialect}
		w.Begin(b.TS, len(b.Events))
		for i := range b.Events {
			e := &b.Events[i]
			if len(e.Extra) > 0 && len(e.Extra[0].Texts) > 1 {
				e.Salt = e.Extra[0].Texts[1]
			}
			w.Event(e)
		}
		if got := hex.EncodeToString(w.End(b.Rank)); got != c.Hex {
			t.Errorf("%s as %s:\n got %s\nwant %s", c.Name, dialect, got, c.Hex)
		}
	}
	if len(want) > 0 {
		t.Errorf("not recorded: %v", want)
	}
}
