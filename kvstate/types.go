package kvstate

import (
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Reservation is one key of the reservations bucket.
type Reservation struct {
	subjects.Held
	Revision uint64
	Stored   time.Time     // NATS server's clock
	TTL      time.Duration // from Stored; 0 = none
	Body     []byte        // the request; nil when followed headers-only
}

// Marker is a deleted reservation, for as long as its marker lives.
type Marker struct {
	subjects.Released
	Revision uint64
	Stored   time.Time
	TTL      time.Duration // from Stored; 0 = none
}

// Registered is one entry of the result register.
type Registered struct {
	subjects.Answer
	Revision uint64
	Stored   time.Time
	Body     []byte // the result; nil when followed headers-only or received
}

// Value is a decoded value of a small bucket.
type Value[T any] struct {
	Key      string
	V        T
	Revision uint64
	Stored   time.Time
	TTL      time.Duration // from Stored; 0 = none of its own
}
