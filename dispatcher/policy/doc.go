// Package policy scores engines for one request: eligibility, load basis,
// admission, owner guard, score, escape, pick. Pure: no goroutine, clock,
// network or randomness; the same input gives the same decision on every machine.
package policy
