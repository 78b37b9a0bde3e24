package telemetry

import (
	"bytes"
	"strconv"
)

// label is one name="value" of a series; the value is unescaped.
type label struct{ name, value string }

// scan reads a Prometheus text exposition line by line and calls f for every
// sample. A line that does not parse is counted and costs nobody else: the
// general parser stops at the first one and leaves half a family behind. Types
// and help are ignored, since engines leave them out or get them wrong; so are
// timestamps and exemplars. labels is valid during the call only.
func scan(text []byte, f func(name string, labels []label, v float64)) (bad int) {
	var labels []label
	for len(text) > 0 {
		line := text
		if i := bytes.IndexByte(text, '\n'); i >= 0 {
			line, text = text[:i], text[i+1:]
		} else {
			text = nil
		}
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		end := bytes.IndexAny(line, "{ \t")
		if end <= 0 || !validName(line[:end]) {
			bad++
			continue
		}
		name, rest := line[:end], line[end:]
		labels = labels[:0]
		if rest[0] == '{' {
			var ok bool
			if labels, rest, ok = readLabels(rest[1:], labels); !ok {
				bad++
				continue
			}
		}
		rest = bytes.TrimLeft(rest, " \t")
		value := rest
		if i := bytes.IndexAny(rest, " \t"); i >= 0 {
			value = rest[:i]
		}
		v, err := strconv.ParseFloat(string(value), 64)
		if err != nil {
			bad++
			continue
		}
		f(string(name), labels, v)
	}
	return bad
}

func validName(b []byte) bool {
	for i, c := range b {
		switch {
		case c == '_' || c == ':' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z':
		case i > 0 && c >= '0' && c <= '9':
		default:
			return false
		}
	}
	return len(b) > 0
}

// readLabels reads up to and over the closing brace.
func readLabels(b []byte, dst []label) ([]label, []byte, bool) {
	for {
		b = bytes.TrimLeft(b, " \t,")
		if len(b) == 0 {
			return dst, nil, false
		}
		if b[0] == '}' {
			return dst, b[1:], true
		}
		eq := bytes.IndexByte(b, '=')
		if eq < 0 {
			return dst, nil, false
		}
		name := bytes.TrimSpace(b[:eq])
		b = bytes.TrimLeft(b[eq+1:], " \t")
		if !validName(name) || len(b) == 0 || b[0] != '"' {
			return dst, nil, false
		}
		value, rest, ok := readQuoted(b[1:])
		if !ok {
			return dst, nil, false
		}
		dst, b = append(dst, label{string(name), value}), rest
	}
}

func readQuoted(b []byte) (string, []byte, bool) {
	i := bytes.IndexAny(b, `"\`)
	if i < 0 {
		return "", nil, false
	}
	if b[i] == '"' {
		return string(b[:i]), b[i+1:], true
	}
	var out []byte
	for i := 0; i < len(b); i++ {
		switch c := b[i]; c {
		case '"':
			return string(out), b[i+1:], true
		case '\\':
			i++
			if i == len(b) {
				return "", nil, false
			}
			switch b[i] {
			case 'n':
				out = append(out, '\n')
			default:
				out = append(out, b[i])
			}
		default:
			out = append(out, c)
		}
	}
	return "", nil, false
}

// get finds a label.
func get(labels []label, name string) (string, bool) {
	for _, l := range labels {
		if l.name == name {
			return l.value, true
		}
	}
	return "", false
}
