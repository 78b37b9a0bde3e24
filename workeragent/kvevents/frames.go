package kvevents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
)

// ErrFrames is a multipart message that is none of the known forms: drop it,
// keep the subscription.
var ErrFrames = errors.New("malformed ZeroMQ message")

// Message is one multipart message taken apart.
type Message struct {
	Topic   string
	Epoch   string // of the publisher, where its topic carries one
	Seq     uint64
	Payload []byte
	End     bool // a replay has no more
}

// epochMark separates a topic from the publisher's epoch (a proposal).
const epochMark = "\x00sgl-kv-epoch="

// ParseLive takes a message of the SUB socket apart: topic, sequence, payload.
// A SUB has no delimiter: an empty first frame is the empty topic.
func ParseLive(frames [][]byte) (Message, error) {
	if len(frames) != 3 {
		return Message{}, fmt.Errorf("%w: %d frames, want topic, sequence, payload", ErrFrames, len(frames))
	}
	return message(frames[0], frames[1], frames[2])
}

// ParseReplay takes a message of the DEALER socket apart, in both framings:
// after exactly one empty delimiter come sequence and payload, before them
// perhaps the topic. All ones with an empty payload is the end.
func ParseReplay(frames [][]byte) (Message, error) {
	if len(frames) < 3 || len(frames) > 4 || len(frames[0]) != 0 {
		return Message{}, fmt.Errorf("%w: %d frames of a replay", ErrFrames, len(frames))
	}
	var topic []byte
	if len(frames) == 4 {
		topic = frames[1]
	}
	m, err := message(topic, frames[len(frames)-2], frames[len(frames)-1])
	m.End = err == nil && m.Seq == math.MaxUint64 && len(m.Payload) == 0
	return m, err
}

func message(topic, seq, payload []byte) (Message, error) {
	if len(seq) != 8 {
		return Message{}, fmt.Errorf("%w: sequence of %d bytes, want 8", ErrFrames, len(seq))
	}
	m := Message{Seq: binary.BigEndian.Uint64(seq), Payload: payload}
	m.Topic, m.Epoch, _ = strings.Cut(string(topic), epochMark)
	return m, nil
}

// ReplayRequest are the frames that ask for everything from a sequence on. Any
// other number of frames is never answered.
func ReplayRequest(from uint64) [][]byte {
	return [][]byte{{}, binary.BigEndian.AppendUint64(nil, from)}
}
