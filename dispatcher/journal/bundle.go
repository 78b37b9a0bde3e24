package journal

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
)

// A bundle is one file: its first line, the manifest as a line of JSON, then
// each frame behind its length, a length of 0, and the SHA-256 of all before it.
const bundleLine = "rollbus journal bundle 1\n"

const bundlePrefix = "rollbus journal bundle "

// maxFrame bounds a frame read from a bundle.
const maxFrame = 64 << 20

// Manifest tells what a bundle is of.
type Manifest struct {
	Pool    string `json:"pool,omitempty"`
	Program string `json:"program,omitempty"` // version of the program that made it
	Made    string `json:"made,omitempty"`    // RFC 3339, for people
	// Modelled says that the run took place in virtual time: a trace was imported.
	Modelled bool `json:"modelled,omitempty"`
}

// BundleSummary tells what was written.
type BundleSummary struct {
	Frames int    `json:"frames"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// WriteBundle writes frames as one file.
func WriteBundle(w io.Writer, m Manifest, frames iter.Seq2[[]byte, error]) (s BundleSummary, err error) {
	sum := sha256.New()
	out := bufio.NewWriter(w)
	both := io.MultiWriter(out, sum)
	put := func(b []byte) {
		if err == nil {
			var n int
			n, err = both.Write(b)
			s.Bytes += int64(n)
		}
	}
	put([]byte(bundleLine))
	j, jerr := json.Marshal(m)
	if jerr != nil {
		return s, fmt.Errorf("bundle: %w", jerr)
	}
	put(append(j, '\n'))
	for f, ferr := range frames {
		if ferr != nil {
			return s, ferr
		}
		put(binary.AppendUvarint(nil, uint64(len(f))))
		put(f)
		if s.Frames++; err != nil {
			return s, fmt.Errorf("bundle: %w", err)
		}
	}
	put([]byte{0})
	if err == nil {
		d := sum.Sum(nil)
		s.SHA256 = hex.EncodeToString(d)
		if _, err = out.Write(d); err == nil {
			s.Bytes += int64(len(d))
			err = out.Flush()
		}
	}
	if err != nil {
		return s, fmt.Errorf("bundle: %w", err)
	}
	return s, nil
}

// ReadBundle reads a bundle's manifest and then yields its frames. A truncated
// or changed file yields what can be read, then one error.
func ReadBundle(r io.Reader) (m Manifest, frames iter.Seq2[[]byte, error], err error) {
	in := bufio.NewReader(r)
	sum := sha256.New()
	first, err := in.ReadString('\n')
	switch {
	case first != bundleLine && len(first) > len(bundlePrefix) && first[:len(bundlePrefix)] == bundlePrefix:
		return m, nil, fmt.Errorf("%w: bundle version %q", ErrVersion, first[len(bundlePrefix):len(first)-1])
	case first != bundleLine:
		return m, nil, fmt.Errorf("%w: its first line is not that of a bundle", ErrForeign)
	case err != nil:
		return m, nil, fmt.Errorf("bundle: %w", err)
	}
	line, err := in.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &m)
	}
	if err != nil {
		return m, nil, fmt.Errorf("%w: manifest of the bundle: %w", ErrCorrupt, err)
	}
	sum.Write([]byte(first))
	sum.Write(line)
	at := int64(len(first) + len(line))
	return m, func(yield func([]byte, error) bool) {
		broken := func(format string, args ...any) {
			yield(nil, fmt.Errorf("%w: at byte %d of the bundle: "+format, append([]any{ErrCorrupt, at}, args...)...))
		}
		for {
			n, err := binary.ReadUvarint(in)
			if err != nil {
				broken("the end is missing")
				return
			}
			sum.Write(binary.AppendUvarint(nil, n))
			if n == 0 {
				break
			}
			if n > maxFrame {
				broken("a frame of %d bytes", n)
				return
			}
			f := make([]byte, n)
			if _, err := io.ReadFull(in, f); err != nil {
				broken("a frame is cut off")
				return
			}
			sum.Write(f)
			at += int64(n) + int64(len(binary.AppendUvarint(nil, n)))
			if !yield(f, nil) {
				return
			}
		}
		d := make([]byte, sha256.Size)
		if _, err := io.ReadFull(in, d); err != nil {
			broken("the digest is missing")
			return
		}
		if !bytes.Equal(d, sum.Sum(nil)) {
			broken("the digest of the whole is another")
			return
		}
		if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
			broken("something stands behind the end")
		}
	}, nil
}

// Slice yields frames that are in memory.
func Slice(frames [][]byte) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		for _, f := range frames {
			if !yield(f, nil) {
				return
			}
		}
	}
}
