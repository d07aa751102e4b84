# Puts the table of the first file into the second one, a page: below its line "<!-- steps -->", in place of the table
# that is there. `awk -f notes/steps.awk TABLE PAGE` prints the page.
FNR == NR { table = table $0 "\n"; next }
/^<!-- steps -->$/ { print; getline; print; printf "%s", table; skips = 1; next }
skips && /^\|/ { next }
{ skips = 0; print }
