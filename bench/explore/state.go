package explore

import (
	"encoding/binary"
	"slices"
)

// Bounds of a scene: its numbers are small enough for bytes and bit sets.
const (
	maxDispatchers = 3
	maxEngines     = 3
	maxKeys        = 2
	maxRollouts    = 8
)

// lane is one followed stream.
type lane uint8

const (
	laneReservations lane = iota // and seeds
	laneOwners
	laneEngines // registrations and cache events
	lanes
)

// message is a copy of a request in ROLLOUTS or RETRY.
type message struct {
	fetched uint32 // as delivered
	rollout uint8
	holders uint8 // dispatchers that have it in hand, a bit each
	waits   bool  // to be delivered
	gone    bool  // acknowledged
}

// write is an effect on its way to the bus. With doubt it was carried out once
// already, and the answer was lost.
type write struct {
	effect uint32
	doubt  bool
}

// stored is what stands at a subject.
type stored struct {
	ev  uint32 // number of its event; 0 = nothing was ever there, or it has expired
	rev uint16
	now uint8 // when it was stored
}

// bindID is a message id of the reservations bucket.
type bindID struct {
	rollout, bind uint8
	seq           uint16
}

// budget is what may still go wrong.
type budget struct{ Crash, Restart, Return, Fail, NoUsage, Unreleased, Lost, Redeliver, Evict, Jump uint8 }

// state is all of a world at one instant. States are values: a move makes a new one.
type state struct {
	now      uint8
	cores    [maxDispatchers]int32 // -1 = dead
	pos      [maxDispatchers][lanes]uint8
	lanes    [lanes][]uint32 // what somebody alive has not seen yet
	seq      uint16          // of the reservations stream
	last     [maxEngines]uint16
	keys     []uint32                    // reservations, by rollout and engine
	markers  []uint32                    // of them
	seeds    [maxKeys]stored             // a seed, its cooldown, or its marker
	owners   [maxKeys]stored             // entries
	ownerRev uint16                      // of the stream
	ownerAt  [maxKeys]uint16             // last revision at a key, markers included
	proved   [maxKeys]int8               // when a seed was proven; -1 = never
	sown     [maxRollouts]uint16         // bind numbers that were seeds, a bit each
	answers  [maxRollouts]uint32         // the register
	epoch    [maxEngines]uint8           // lives
	cacheSeq [maxEngines]uint8           // of cache events
	regs     [maxEngines]uint32          // registrations
	ids      []bindID                    // of the bucket
	retries  [maxRollouts]uint16         // message ids in RETRY, a bit for each bind number
	messages []message                   // in ROLLOUTS and RETRY
	writes   [maxDispatchers + 1][]write // the last: of dispatchers that died
	left     budget
}

func (s *state) clone() *state {
	n := *s
	for i := range n.lanes {
		n.lanes[i] = slices.Clone(s.lanes[i])
	}
	n.keys, n.markers = slices.Clone(s.keys), slices.Clone(s.markers)
	n.ids, n.messages = slices.Clone(s.ids), slices.Clone(s.messages)
	for i := range n.writes {
		n.writes[i] = slices.Clone(s.writes[i])
	}
	return &n
}

// digest of all that matters to what comes.
func (s *state) digest(buf []byte) (digest, []byte) {
	b := buf[:0]
	u16 := func(v uint16) { b = binary.LittleEndian.AppendUint16(b, v) }
	u32 := func(v uint32) { b = binary.LittleEndian.AppendUint32(b, v) }
	b = append(b, s.now)
	for i := range s.cores {
		u32(uint32(s.cores[i]))
		b = append(b, s.pos[i][:]...)
	}
	for i := range s.lanes {
		b = append(b, byte(len(s.lanes[i])))
		for _, v := range s.lanes[i] {
			u32(v)
		}
	}
	u16(s.seq)
	u16(s.ownerRev)
	for i := range maxEngines {
		u16(s.last[i])
		b = append(b, s.epoch[i], s.cacheSeq[i])
		u32(s.regs[i])
	}
	for _, list := range [][]uint32{s.keys, s.markers, s.answers[:]} {
		b = append(b, byte(len(list)))
		for _, v := range list {
			u32(v)
		}
	}
	for i := range maxKeys {
		for _, x := range []stored{s.seeds[i], s.owners[i]} {
			u32(x.ev)
			u16(x.rev)
			b = append(b, x.now)
		}
		u16(s.ownerAt[i])
		b = append(b, byte(s.proved[i]))
	}
	for i := range maxRollouts {
		u16(s.sown[i])
		u16(s.retries[i])
	}
	b = append(b, byte(len(s.ids)))
	for _, x := range s.ids {
		b = append(b, x.rollout, x.bind)
		u16(x.seq)
	}
	b = append(b, byte(len(s.messages)))
	for _, m := range s.messages {
		u32(m.fetched)
		b = append(b, m.holders, bit(m.waits)|bit(m.gone)<<1)
	}
	for i := range s.writes {
		b = append(b, byte(len(s.writes[i])))
		for _, w := range s.writes[i] {
			u32(w.effect)
			b = append(b, bit(w.doubt))
		}
	}
	l := &s.left
	b = append(b, l.Crash, l.Restart, l.Return, l.Fail, l.NoUsage, l.Unreleased, l.Lost, l.Redeliver, l.Evict, l.Jump)
	return sum(b), b
}

func bit(v bool) byte {
	if v {
		return 1
	}
	return 0
}
