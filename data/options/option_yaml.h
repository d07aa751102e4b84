/* option_yaml.h: the settings of a YAML file of options. */
#ifndef MT_OPTION_YAML_H
#define MT_OPTION_YAML_H

#include "option_source.h"
#include "yaml.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Adds the settings of a file: names with underscores or dashes, flat or in sections, whose names have no meaning. A
 * file of Megatron-LM's own tests has them in the section MODEL_ARGS, as words of a command line:
 *
 *   ENV_VARS: {DATA: /data}                                for ${DATA}, before the environment
 *   MODEL_ARGS: {--num-layers: 12, --bf16: true, --data-path: "0.5 ${DATA}/a 0.5 ${DATA}/b"}
 *   TEST_TYPE: regular                                     the other keys are of the test
 *
 * The reader notes the keys without effect. */
int mt_givens_add_yaml(mt_givens *givens, mt_yaml *yaml, mt_option_reader *reader);

#ifdef __cplusplus
}
#endif
#endif
