package subjects

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Duration is a time.Duration that reads and writes as "1h30m" in JSON; a bare
// number is seconds.
type Duration time.Duration

// Hour is here so that limits read as words.
const Hour = Duration(time.Hour)

// D is the plain duration.
func (d Duration) D() time.Duration { return time.Duration(d) }

// String is Go's notation.
func (d Duration) String() string { return time.Duration(d).String() }

// MarshalJSON writes Go's notation.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(d.String()) }

var errDuration = errors.New(`want a duration such as "90s" or "6h", or a number of seconds`)

// UnmarshalJSON reads Go's notation or a number of seconds.
func (d *Duration) UnmarshalJSON(b []byte) error {
	var s string
	if json.Unmarshal(b, &s) == nil {
		v, err := time.ParseDuration(s)
		if err != nil {
			return fmt.Errorf("%q: %w", s, errDuration)
		}
		*d = Duration(v)
		return nil
	}
	var f float64
	if json.Unmarshal(b, &f) != nil {
		return fmt.Errorf("%.40s: %w", b, errDuration)
	}
	const most = float64(1 << 53) // seconds, far beyond any use
	if f != f || f > most/1e9 || f < -most/1e9 {
		return fmt.Errorf("%.40s is out of range: %w", b, errDuration)
	}
	*d = Duration(f * float64(time.Second))
	return nil
}
