/* Every kernel, in the order they build on one another. */
#include "rows.h"

#include "softmax.h"

#include "select.h"

#include "edit.h"

#include "judged.h"

#include "top_k.h"

#include "winners.h"

#include "noise.h"

#include "mass.h"

#include "nucleus.h"

#include "truncate.h"

#include "whole.h"

#include "few.h"

#include "sample.h"

#include "draws.h"

#include "candidates.h"

#include "chain.h"

#include "probs.h"

#include "tile.h"

#include "logprobs.h"

#include "beams.h"

#include "speculation.h"

#include "arithmetic.h"

#include "filters.h"

#include "apply.h"

#include "moves.h"

#include "side.h"

#include "move_kv.h"

#include "products.h"

#include "attend.h"

#include "merge.h"

#include "floors.h"
