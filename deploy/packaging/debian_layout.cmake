# Run by CPack on each staged package, before the package is written: /usr/etc becomes /etc, and the documents that every Debian
# package has are added.
set(names server ballast-server dev libballast-dev dashboards ballast-dashboards alerts ballast-alerts)
foreach(component ${CPACK_COMPONENTS_ALL})
  set(stage ${CPACK_TEMPORARY_DIRECTORY}/${component})
  if(IS_DIRECTORY ${stage}/usr/etc)
    file(RENAME ${stage}/usr/etc ${stage}/etc)
  endif()
  list(FIND names ${component} index)
  math(EXPR index "${index} + 1")
  list(GET names ${index} package)
  set(documents ${stage}/usr/share/doc/${package})
  file(MAKE_DIRECTORY ${documents})
  file(COPY_FILE ${CMAKE_CURRENT_LIST_DIR}/copyright ${documents}/copyright)
  execute_process(COMMAND gzip -9n INPUT_FILE ${CMAKE_CURRENT_LIST_DIR}/../../CHANGELOG.md OUTPUT_FILE ${documents}/changelog.gz
    COMMAND_ERROR_IS_FATAL ANY)
endforeach()
