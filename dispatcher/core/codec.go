package core

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"time"
)

// CodecVersion is the version of the encoding of events and effects. A reader
// refuses a later one; fields may be added within a version.
const CodecVersion = 1

// ErrEncoding says that bytes are no event or effect of a version known here.
var ErrEncoding = errors.New("not an event or effect")

type envelope struct {
	V    int             `json:"v"`
	Now  time.Duration   `json:"now,omitempty"`
	Type string          `json:"t"`
	Body json.RawMessage `json:"b"`
}

func byName(of ...any) map[string]reflect.Type {
	m := make(map[string]reflect.Type, len(of))
	for _, v := range of {
		t := reflect.TypeOf(v)
		m[t.Name()] = t
	}
	return m
}

var eventTypes = byName(Tick{}, ServerTime{}, Contact{}, ViewSwap{}, ReservationPut{}, ReservationGone{},
	Answered{}, EnginePut{}, EngineGone{}, DispatcherPut{}, DispatcherGone{}, CancelPut{}, PoolPut{}, Jobs{},
	Fetched{}, Acquire{}, FetchDone{}, BindAnswer{}, LeaderAnswer{}, RetryAnswer{}, DeleteAnswer{}, ResultAnswer{},
	DeadAnswer{}, Load{}, Cache{}, Snapshot{}, Stop{}, SeedPut{}, SeedGone{}, OwnerPut{}, OwnersGone{}, SeedAnswer{}, OwnersAnswer{})

var effectTypes = byName(EnsureConsumer{}, Fetch{}, Bind{}, GetFromLeader{}, Retry{}, DeleteKey{},
	PublishResult{}, PublishDead{}, Ack{}, NakDelay{}, Granted{}, Refused{}, AskSnapshot{}, Rebuild{}, Decision{}, Count{},
	SeedBind{}, WriteSeed{}, WriteOwners{}, Transition{})

func encode(v any, now time.Duration) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode %T: %w", v, err)
	}
	return json.Marshal(envelope{CodecVersion, now, reflect.TypeOf(v).Name(), b})
}

func decode(b []byte, types map[string]reflect.Type) (any, time.Duration, error) {
	var e envelope
	if err := json.Unmarshal(b, &e); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", ErrEncoding, err)
	}
	if e.V < 1 || e.V > CodecVersion {
		return nil, 0, fmt.Errorf("%w: version %d, this program reads 1 to %d", ErrEncoding, e.V, CodecVersion)
	}
	t, ok := types[e.Type]
	if !ok {
		return nil, 0, fmt.Errorf("%w: unknown type %q", ErrEncoding, e.Type)
	}
	v := reflect.New(t)
	if err := json.Unmarshal(e.Body, v.Interface()); err != nil {
		return nil, 0, fmt.Errorf("%w: %s: %w", ErrEncoding, e.Type, err)
	}
	return v.Elem().Interface(), e.Now, nil
}

// EncodeEvent writes an event and its time as one line of JSON.
func EncodeEvent(ev Event, now time.Duration) ([]byte, error) { return encode(ev, now) }

// DecodeEvent is the inverse of EncodeEvent.
func DecodeEvent(b []byte) (Event, time.Duration, error) {
	v, now, err := decode(b, eventTypes)
	if err != nil {
		return nil, 0, err
	}
	return v.(Event), now, nil
}

// EncodeEffect writes an effect as one line of JSON.
func EncodeEffect(e Effect) ([]byte, error) { return encode(e, 0) }

// DecodeEffect is the inverse of EncodeEffect.
func DecodeEffect(b []byte) (Effect, error) {
	v, _, err := decode(b, effectTypes)
	if err != nil {
		return nil, err
	}
	return v.(Effect), nil
}
