# Puts the table of the first file into the second one, a page: below its line "<!-- rows of 28-planner.svg -->", in
# place of the table that is there. `awk -f notes/planner_rows.awk TABLE PAGE` prints the page.
FNR == NR { table = table $0 "\n"; next }
/^<!-- rows of 28-planner.svg -->$/ { print; getline; print; printf "%s", table; skips = 1; next }
skips && /^\|/ { next }
{ skips = 0; print }
