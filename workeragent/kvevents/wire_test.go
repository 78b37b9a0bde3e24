package kvevents

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestChangesAndPartsSurviveTheWire(t *testing.T) {
	c := Change{Epoch: "e-1", Seq: 7, Namespace: 9, Kind: Stored, Tier: CPU, Blocks: []uint64{1, 1 << 63}}
	got, err := DecodeChange(AppendChange(nil, &c), nil)
	if d := cmp.Diff(c, got); d != "" || err != nil {
		t.Errorf("%v %s", err, d)
	}
	c.HasParent, c.Parent = true, 8
	got, err = DecodeChange(AppendChange(nil, &c), nil)
	if d := cmp.Diff(c, got); d != "" || err != nil {
		t.Errorf("%v %s", err, d)
	}
	p := Part{Epoch: "e-1", AsOf: 7, Number: 3, Last: true, Tier: SSD, Blocks: []uint64{5}}
	back, err := DecodePart(AppendPart(nil, &p), nil)
	if d := cmp.Diff(p, back); d != "" || err != nil {
		t.Errorf("%v %s", err, d)
	}
}

// The bytes are a contract with dispatchers of other versions.
func TestTheBytesOfAChange(t *testing.T) {
	got := AppendChange(nil, &Change{Epoch: "ab", Seq: 1, Namespace: 2, Kind: Removed, Tier: SSD, Blocks: []uint64{0x0102030405060708}})
	if d := cmp.Diff(unhex(t, "0102020201000000000000000200000000000000"+"6162"+"0807060504030201"), got); d != "" {
		t.Error(d)
	}
	got = AppendChange(nil, &Change{Epoch: "ab", Seq: 1, Namespace: 2, Kind: Stored, Parent: 3, HasParent: true, Blocks: []uint64{4}})
	if d := cmp.Diff(unhex(t, "0111000201000000000000000200000000000000"+"6162"+"0300000000000000"+"0400000000000000"), got); d != "" {
		t.Error(d)
	}
	for _, bad := range []string{"0113", "0112", "0114", "0110"} { // a parent of what is not stored
		if _, err := DecodeChange(unhex(t, bad+"000201000000000000000200000000000000"+"6162"+"0300000000000000"), nil); !errors.Is(err, ErrWire) {
			t.Errorf("op %s: %v", bad[2:], err)
		}
	}
	if _, err := DecodeChange(unhex(t, "0111000001000000000000000200000000000000"), nil); !errors.Is(err, ErrWire) {
		t.Errorf("a parent announced and not there: %v", err)
	}
}

func FuzzWire(f *testing.F) {
	f.Add(AppendChange(nil, &Change{Epoch: "e", Kind: Stored, Blocks: []uint64{1}}))
	f.Add(AppendChange(nil, &Change{Epoch: "e", Kind: Stored, HasParent: true, Parent: 2, Blocks: []uint64{1}}))
	f.Add(AppendPart(nil, &Part{Epoch: "e", Last: true, Blocks: []uint64{1}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := DecodeChange(b, nil); err == nil {
			if d := cmp.Diff(b, AppendChange(nil, &c)); d != "" {
				t.Error(d)
			}
		} else if !errors.Is(err, ErrWire) {
			t.Error(err)
		}
		_, _ = DecodePart(b, nil)
	})
}
