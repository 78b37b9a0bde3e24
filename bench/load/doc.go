// Package load measures what real processes of rollbus occupy, in MiB of VmRSS.
// It is only tests, behind the build tag load: `make test-load` builds the
// program, runs it for a few minutes beside an embedded NATS server, prints a
// table and fails when a bound is broken.
package load
