"""Link speeds of the ranks that run this, by small arrays; the first argument is the file for the result."""

import sys

from benchmarks.common.checks import link_speeds

sys.exit(link_speeds.main(["--device", "cpu", "--most-bytes", "20000", "--output", sys.argv[1]]))
