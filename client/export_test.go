package client

import "time"

// PollEvery scales how often Wait and Tokens look into the register.
func PollEvery(d time.Duration) Option {
	return func(o *options) error { o.poll = d; return nil }
}
